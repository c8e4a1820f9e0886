"""Bytes of the workers in, logs and prefixed whole lines out."""
