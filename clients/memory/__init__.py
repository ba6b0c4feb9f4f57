"""Memory that client and daemon share: extents mapped read-only, staging, and the caller's own buffers.

Moves bytes, makes no calls. Imported by operations, links, fake, aio, sync and the runtimes; imports errors
and v1.
"""
