"""Benchmarks of Zephon: `python -m benchmarks.run --help`."""
