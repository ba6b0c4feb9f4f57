"""Codecs that may lose what a calibrated profile allows, head by head, and the profile's files.

Each implements `tiers/codecs/base.py`.
Imported by `tiers/codecs` and `appliance/compression`.
"""
