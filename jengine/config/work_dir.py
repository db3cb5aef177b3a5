"""Names of the files that a run writes into its work dir and other programs read."""

# In the log directory: parameter groups, times, versions and progress.
RECORD = "run.json"
