"""What `doctor` looks at: a function for each thing, findings as values."""
