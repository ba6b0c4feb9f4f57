"""The GPU tier of this daemon and the other GPUs of its host.

Devices, pages and kernels are in `tiers/gpu`.
Imported by `host`; imports `server`, never the other way round (`server/ports.py`).
"""
