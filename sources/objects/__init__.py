"""An object store that hosts share: bundles of blocks, their names, and a client.

    bundle > layout      the bytes of one object: pure functions over buffers
    keys  finding  lifecycle                which objects there are, and for how long: pure
    store > problems, usage    the operations that are needed, by obstore; its errors; requests and bytes
    opening > pool > pool_lanes > pool_child   over Mooncake Store, in a process of its own
    inventory            finds, reads and verifies what a store holds
    probe                tries a store and names what it lacks

docs/bundle-format.md specifies the bytes, docs/decisions/0022-object-store.md says why.
"""
