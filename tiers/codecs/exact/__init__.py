"""Codecs that give back every bit: lz4 and zstd, exponents, float8, planes, identity.

Each implements `tiers/codecs/base.py`.
Imported by `tiers/codecs/registry.py`.
"""
