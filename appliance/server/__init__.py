"""The transports and services of the daemon: gRPC, the local channel, and what every call means.

Callers are checked by `security`; what lies above (reload, observability, pages of runtimes) is reached
through the protocols of `ports.py`. Imported by `gpu`, `observability` and `host`.
"""
