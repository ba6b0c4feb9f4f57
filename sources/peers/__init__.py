"""Other hosts as a source: what each says it holds, and the connection that carries the bytes.

    inventory        names of a host's blocks, 8 bytes each
    connection > sending, receiving      a data connection: a ticket there, payloads back, by sockets

docs/decisions/0024-peers.md says why. Imports `tiers`; imported by `appliance`.
"""
