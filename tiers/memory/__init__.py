"""Memory tiers: sealed extents of slots that clients map read-only, and the shared index.

Slots are the room, `engine.py` moves bytes; `staging.py` is what a client writes.
Imported by `appliance` and `tiers/gpu`.
"""
