"""AdminService: what people and their tools ask of the daemon.

Imported by `host`; stands above `observability`, which answers many of its calls.
"""
