"""Documents from the hub, files, rows and the standard library."""
