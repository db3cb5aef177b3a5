"""Benchmark the engine: `python -m benchmarks` runs all of them, writes RESULTS.md, and checks against ratios.json."""
