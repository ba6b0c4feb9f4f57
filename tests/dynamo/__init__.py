"""Dynamo's own indexer and selection service (ai-dynamo-runtime) as listeners: `make test-dynamo`."""
