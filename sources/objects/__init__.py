"""An object store that hosts share: bundles of blocks, their names, and a client.

    bundle > layout      the bytes of one object: pure functions over buffers
    keys                 names of objects, and the epochs that they expire with: pure
    store > problems     the operations that are needed, by obstore, and what its errors mean
    inventory            reads and verifies what a store holds

docs/bundle-format.md specifies the bytes, docs/decisions/0022-object-store.md says why.
"""
