"""Eviction policies from the literature, for comparison and for administrators that want one.

Every one is measured in docs/benchmarks by `kvtier replay`.
Imported by `policies/registry.py`, and its data structures by `policies/urgency`.
"""
