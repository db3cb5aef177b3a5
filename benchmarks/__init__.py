"""Benchmarks: `python -m benchmarks` runs all of them, writes RESULTS.md, and holds the ratios to ratios.json."""
