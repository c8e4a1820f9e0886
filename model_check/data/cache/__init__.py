"""The token cache on disk: shared, locked, published, inspected, cleaned."""
