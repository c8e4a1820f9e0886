"""Arms with different settings side by side: on the command line, planned, run."""
