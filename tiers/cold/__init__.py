"""The cold store on NVMe: an append-only log of segments with checksummed records.

Room, engine, recovery, direct I/O and on-disk formats.
Imported by `appliance/host`, `core` (the room only) and `tiers/gpu/decode`.
"""
