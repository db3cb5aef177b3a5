"""Runs on disk: their files, their metrics, and tables of several of them."""

RECORD = "run.json"  # parameter groups, times, versions and progress, which a run writes into its log directory
