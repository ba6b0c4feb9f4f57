"""Stable reasons why a daemon cannot be reached: condition and recovery of each, and `Diagnosis`.

Read by `diagnosis.py` (Unix sockets, calls) and `port_diagnosis.py` (TCP). Imports neither.
"""

from typing import NamedTuple

NOT_RUNNING = "NOT_RUNNING"
SOCKET_DENIED = "SOCKET_DENIED"
NO_ANSWER = "NO_ANSWER"
CONNECTION_LOST = "CONNECTION_LOST"
BAD_CREDENTIALS = "BAD_CREDENTIALS"
BAD_TARGET = "BAD_TARGET"
NOT_KVTIER = "NOT_KVTIER"
UNKNOWN_HOST = "UNKNOWN_HOST"
TLS_NEEDED = "TLS_NEEDED"
TLS_NOT_SPOKEN = "TLS_NOT_SPOKEN"
TLS_UNTRUSTED = "TLS_UNTRUSTED"
TLS_WRONG_NAME = "TLS_WRONG_NAME"
TLS_EXPIRED = "TLS_EXPIRED"
TLS_CERTIFICATE_NEEDED = "TLS_CERTIFICATE_NEEDED"
TLS_CERTIFICATE_REFUSED = "TLS_CERTIFICATE_REFUSED"

#: Reasons that never leave the caller's side: condition and recovery. docs/api.md is printed from it.
REASONS: dict[str, tuple[str, str]] = {
    NOT_RUNNING: ("nothing listens at the target", "start a daemon, or name its address; treat as a miss"),
    SOCKET_DENIED: (
        "this user may not open the daemon's socket, or not search a folder on the way to it",
        "join the socket's group (`supplementalGroups` in Kubernetes); the message names modes and owners",
    ),
    NO_ANSWER: ("the daemon stayed silent past the deadline", "look at its log; treat as a miss"),
    CONNECTION_LOST: (
        "the connection broke during a call",
        "treat as a miss; the next call connects anew",
    ),
    BAD_CREDENTIALS: ("a file named by KVTIER_TLS_* or KVTIER_TOKEN_FILE cannot be used", "fix that file"),
    BAD_TARGET: ("the target is no address", "write unix:///path or host:port"),
    NOT_KVTIER: (
        "something else listens at the target",
        "name the daemon's gRPC address, an entry of `listen`",
    ),
    UNKNOWN_HOST: ("the target's host name does not resolve", "fix the name"),
    TLS_NEEDED: ("the port speaks TLS, and KVTIER_TLS_CA is not set", "set KVTIER_TLS_CA"),
    TLS_NOT_SPOKEN: (
        "KVTIER_TLS_CA is set, and the port speaks no TLS",
        "unset it, or give the daemon access.tls",
    ),
    TLS_UNTRUSTED: (
        "the daemon's certificate leads to no authority in KVTIER_TLS_CA",
        "name the authority that signed access.tls.certificate",
    ),
    TLS_WRONG_NAME: (
        "the daemon's certificate is for other names than the target's host",
        "use one of its names in the target, or sign a certificate that has the host",
    ),
    TLS_EXPIRED: (
        "the daemon's certificate has expired or is not valid yet",
        "replace it; check both clocks",
    ),
    TLS_CERTIFICATE_NEEDED: (
        "the daemon asks for a client certificate, and none is set",
        "set KVTIER_TLS_CERTIFICATE and KVTIER_TLS_KEY",
    ),
    TLS_CERTIFICATE_REFUSED: (
        "the daemon refused the client certificate",
        "sign it with an authority in access.tls.client_ca, and keep it from expiring",
    ),
}


class Diagnosis(NamedTuple):
    """Why a target cannot be reached: a key of REASONS, and what to do in one sentence or two."""

    reason: str
    message: str
