"""Names of the files that a run writes into its work dir and other programs read."""

# In the log directory: parameter groups, times, versions and progress.
RECORD = "run.json"
# Scores of checkpoints by processes that follow the run: a directory for each checkpoint, in the
# log directory, and what they decide together.
EVALUATIONS = "evaluations"
SCORES = "scores.json"
VERDICT = "verdict.json"
