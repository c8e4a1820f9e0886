"""Runs that are made of runs: rounds, restarts of a job, a replay of a run that is over."""
