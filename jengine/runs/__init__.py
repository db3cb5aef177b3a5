"""Runs on disk: their files, their metrics, and tables of several of them."""

TRIAL = "trial.json"  # in the work dir of a sweep's run: `overrides`, and `error` or `pruned`
RECORD = "run.json"  # parameter groups, times, versions and progress, which a run writes into its log directory
