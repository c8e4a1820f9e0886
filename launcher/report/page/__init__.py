"""report.html: one file that needs no other, no network and no script."""
