"""Checkpoints: written, found, checked, resumed."""
