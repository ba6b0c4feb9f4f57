"""Values that calls take and return: namespaces, chains of hashes, tiers, reports; and checks of arguments.

No I/O and no connection. Any room may import it; it imports errors.py and `kvtier.v1` only.
"""
