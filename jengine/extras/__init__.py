"""Optional parts. Each folder registers itself with its `plugin.py`, and can be deleted."""
