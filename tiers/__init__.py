"""Tiers: the rooms that keep the books of a memory or a disk, and the engines that move its bytes.

`gpu`, `memory` and `cold` hold one kind of tier each, `codecs` and `encryption` encode records.
Imported by `appliance`; `block` also by `policies`. The layers of its folders are in pyproject.toml.
"""
