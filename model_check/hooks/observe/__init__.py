"""What a run reports: events, scalars, TensorBoard, W&B, profiles."""
