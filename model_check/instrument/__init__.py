"""Watches a training script of a person's own, unchanged: needs the standard library and torch."""
