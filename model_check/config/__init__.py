"""The settings: one typed tree, where each value came from, and its documentation."""
