"""Loops of the codecs over values, compiled by numba where it is installed.

Pure functions of arrays; what they compute is specified by the codecs that call them.
Imported by `tiers/codecs` only.
"""
