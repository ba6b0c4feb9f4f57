"""Places outside this host that blocks can be fetched from: `objects/`, an object store that hosts share.

A tier is owned and accounted for, a source is asked. What it says is a hint: a wrong or late answer is a
miss, never a wrong byte.

Imports `tiers`; imported by `appliance`.
"""
