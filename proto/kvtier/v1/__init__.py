"""The wire contract, and what client and daemon share: messages, shared memory layout, frames, types, errors.

Generated stubs stand beside `types.py`, `errors.py`, `shm.py` and `local.py`.
Imported by everything; imports nothing of kvtier.
"""
