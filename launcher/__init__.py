"""The supervisor: starts, watches, compares and stops the workers. Never imports torch."""
