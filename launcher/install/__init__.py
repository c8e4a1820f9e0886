"""The environment that everything runs in: found, or made once."""
