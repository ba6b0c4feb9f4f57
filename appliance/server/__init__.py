"""The transports and services of the daemon: gRPC, the local channel, and what every call means.

Callers are checked by `security`, pages of runtimes are served by `gpu`.
Imported by `host` and `observability` only.
"""
