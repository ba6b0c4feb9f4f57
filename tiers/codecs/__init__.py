"""Codecs: how the payload of a fragment is written smaller, and read back.

`base.py` is the contract, `registry.py` the list; `exact/` gives back every bit, `lossy/` what a profile
allows. Imported by `tiers/cold`, `tiers/gpu/decode`, `appliance/compression` and, for streams,
`clients/operations/stream_codecs.py`.
"""
