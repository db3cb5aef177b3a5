"""Benchmark the engine: `python -m benchmarks` runs everything, writes RESULTS.md and compares
with ratios.json.
"""
