"""Room in every tier: choose victims, spill, reclaim segments, resize, copy ahead.

`pressure.py` is the entry; quotas of the cold store and the device's room are beside it.
Imports `catalog` and `copying`; imported by `promotion` and `requests`.
"""
