"""The GPU tier of this daemon and the other GPUs of its host.

Devices, pages and kernels are in `tiers/gpu`.
Imported by `server` and `host`.
"""
