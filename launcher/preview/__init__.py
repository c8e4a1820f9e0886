"""What would run, printed; nothing starts."""
