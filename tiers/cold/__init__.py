"""The cold store on NVMe: an append-only log of segments with checksummed records.

Room, engine, recovery, direct I/O and on-disk formats.
The core imports the room (`log.py`) only; the rest is for the shell, replay, tools and `tiers/gpu/decode`.
"""
