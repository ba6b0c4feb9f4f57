"""Benchmarks: figures with their machine, command and ratios against peers in the same run."""
