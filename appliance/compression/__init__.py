"""Which codec is worth its time on this host, and the profiles that lossy codecs follow.

The codecs themselves are in `tiers/codecs`.
Imported by `server`, `preflight` and `host`.
"""
