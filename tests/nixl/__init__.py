"""Bytes between hosts by NIXL, the real library over UCX's TCP: `make test-nixl`."""
