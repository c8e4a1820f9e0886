"""Build what a run asks for: requests, encoding, splits."""
