"""A daemon inside the process, for tests: store, server, and the link that ends in them.

Imported by testing.py only (`kvtier.testing.FakeAppliance`); imports operations, memory and values.
"""
