"""What the events of all workers mean: agreement, causes, verdicts, run.json. Pure over data."""
