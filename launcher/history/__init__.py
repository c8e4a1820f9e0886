"""What became of each GPU in the runs so far: kept, and listed."""
