"""The launchers of one job on several nodes, one on each."""
