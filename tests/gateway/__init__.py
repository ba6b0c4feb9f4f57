"""Faults of a real object store: `make test-gateway`."""
