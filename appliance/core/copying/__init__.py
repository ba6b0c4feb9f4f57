"""Copies in flight: which batch moves which fragments, and what happens when it ends.

Also back-off of a cold store that refuses writes, and the daily budget of writes.
Imports `catalog`; imported by `capacity`, `promotion` and `requests`.
"""
