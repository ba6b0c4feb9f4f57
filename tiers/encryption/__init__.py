"""Encryption of records at rest: tenant keys, master keys and the envelope of one record.

Erasing a tenant destroys its key.
Imported by `tiers/cold` and `appliance`.
"""
