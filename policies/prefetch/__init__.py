"""Prefetch policies: which blocks are promoted before a session asks for them.

The mechanism and its bounds are in `appliance/core`.
Imported by `policies/registry.py`.
"""
