"""Text out of a trained model."""
