"""Caller identity, rights, TLS, tokens and the checks of what a request may contain.

Identity comes from the kernel, a certificate or a token, never from a request field.
Imported by `server`, `gpu`, `observability`, `preflight` and `host`; imports no transport.
"""
