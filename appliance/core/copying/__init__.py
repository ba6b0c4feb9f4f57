"""Copies in flight: which batch moves which fragments, and what happens when it ends.

Also back-off of a cold store that refuses writes, and the daily budget of writes.
Imports `catalog`; imported by the folders above and by `persisted/writes_file.py` (the budget).
"""
