"""kvtier's own eviction policy: chance of a use times what it costs to get a block back, per byte.

Learned online from requests; the price of a block is a pure function of what was seen.
Imported by `policies/registry.py`.
"""
