"""What the events of all workers mean: agreement, outcomes, the report. Pure over data."""
