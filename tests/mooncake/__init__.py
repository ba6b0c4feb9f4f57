"""The object store's port over Mooncake Store's real master and clients: `make test-mooncake`."""
