"""A runtime's paged tensors: their layouts, and copies between pages and fragments.

Addresses are built in columns, so that a batch costs no Python per fragment.
Imported by `appliance/gpu`.
"""
