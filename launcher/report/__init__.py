"""A verdict as lines, JSON and a page; rebuilt from a run directory."""
