"""Mixed load from several processes under faults, and for an hour without any.

`python -m tests.chaos` is the short one with faults, `python -m tests.chaos.soak` the long one without. Both
use the workers of worker.py, which check every byte that they read against content.py.
"""
