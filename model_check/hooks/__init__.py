"""What a run does beside training: the hooks of the loop in `model_check.train`."""
