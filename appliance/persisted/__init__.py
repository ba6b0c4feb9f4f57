"""Small files beside the cold store that a restart reads: learned policies, bytes written.

None of them can fail a start: a damaged file is reported and replaced.
Imported by `host`.
"""
