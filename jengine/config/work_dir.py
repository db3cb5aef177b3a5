"""Names of the files that a run writes into its work dir and other programs read."""

# In the work dir of a sweep's run: `overrides`, and `error` or `pruned`.
TRIAL = "trial.json"
# In the log directory: parameter groups, times, versions and progress.
RECORD = "run.json"
