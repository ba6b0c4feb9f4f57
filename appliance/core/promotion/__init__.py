"""Fragments on their way to a faster tier: loads for requests, prefetch, promotion to the device.

`loads.py` is shared by all three.
Imports `capacity` and below; imported by `requests`.
"""
