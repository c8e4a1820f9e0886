"""What is told of a run: events, scalars, TensorBoard, W&B, profiles."""
