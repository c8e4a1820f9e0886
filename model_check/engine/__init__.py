"""Training: assembly, the step, the optimizer, the schedule, checkpoints, metrics."""
