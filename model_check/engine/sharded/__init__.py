"""Checkpoints of several ranks: a directory in which each has its own files, under one manifest."""
