"""Links: connections to a daemon, over the local channel or gRPC, for a thread and for an event loop.

Send what operations yield; decide nothing. Imported by aio and sync only; imports operations and below.
"""
