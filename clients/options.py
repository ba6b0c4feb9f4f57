"""Timeout, Retry, Limits: the client's settings as value objects, and the gRPC service config they imply."""

import json
from dataclasses import dataclass
from typing import Any

from ..v1.arguments import number, whole

_MAX_ATTEMPTS = 5  # gRPC's own limit
SERVICE = "kvtier.v1.KVCacheService"
CONNECTING = ("GetServerInfo", "OpenClient")
IDEMPOTENT = (
    "CloseClient",
    "RegisterNamespace",
    "Lookup",
    "Release",
    "KeepAlive",
    "Prefetch",
    "Unpin",
    "UpdateSession",
    "EndSession",
)


@dataclass(frozen=True, slots=True)
class Timeout:
    """How long to wait. Every call has a deadline; there is no way to wait for ever."""

    call_s: float = 5.0  # when a call names no deadline of its own
    connect_s: float = 2.0
    grace_s: float = 1.0  # past the deadline, before a silent daemon counts as dead

    def __post_init__(self) -> None:
        for name in ("call_s", "connect_s", "grace_s"):
            number(name, getattr(self, name), 0.0)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often to try. A broken connection is tried anew at once.

    An overloaded daemon is not, but for connecting over gRPC, which waits as the daemon says.
    """

    num_attempts: int = 2
    backoff_s: float = 0.02  # gRPC only: first pause; doubles each time
    max_backoff_s: float = 0.5

    def __post_init__(self) -> None:
        whole("num_attempts", self.num_attempts)
        for name in ("backoff_s", "max_backoff_s"):
            number(name, getattr(self, name), 0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what the client holds."""

    staging_bytes: int = 64 << 20  # wanted; the daemon may grant less
    piece_bytes: int = 8 << 20  # a larger put is cut, so that copying and committing overlap
    max_pending_touches: int = 256  # blocks read one-sidedly and not reported yet
    chunk_bytes: int = 1 << 20  # gRPC only: payload of one message of a stream

    def __post_init__(self) -> None:
        for name in ("staging_bytes", "max_pending_touches"):
            whole(name, getattr(self, name))
        for name in ("piece_bytes", "chunk_bytes"):
            whole(name, getattr(self, name), 1)


DEFAULT_TIMEOUT = Timeout()
DEFAULT_RETRY = Retry()
DEFAULT_LIMITS = Limits()


def plugin_connect_s(call_s: float) -> float:
    """Return how long a plug-in may take to connect, in seconds: one, since an engine waits.

    A longer timeout of its calls, `call_s`, allows more for connecting, too.
    """
    return min(call_s, max(1.0, call_s / 5))


def service_config(retry: Retry) -> str:
    """Return the gRPC service config: UNAVAILABLE is retried, for idempotent calls only.

    The calls that connect are retried under overload, too: of clients that start together, most are told to
    come again.
    """
    policy: dict[str, Any] = {
        "maxAttempts": min(_MAX_ATTEMPTS, max(2, retry.num_attempts)),
        "initialBackoff": f"{retry.backoff_s}s",
        "maxBackoff": f"{retry.max_backoff_s}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    connecting = policy | {
        "maxAttempts": _MAX_ATTEMPTS,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    configs = [
        {"name": [{"service": SERVICE, "method": method} for method in methods], "retryPolicy": one}
        for methods, one in ((IDEMPOTENT, policy), (CONNECTING, connecting))
    ]
    return json.dumps({"methodConfig": configs} if retry.num_attempts > 1 else {})
