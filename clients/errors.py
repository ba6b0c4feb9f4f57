"""What can go wrong, as one tree. A miss is an answer, never an error.

    KvtierError
    ├── Unavailable            no answer, or the daemon drains: recompute; the next call reconnects
    ├── Overloaded             no room, or a queue is full: back off `retry_after_s`, or do without
    ├── DeadlineExceeded       the daemon ran out of the caller's time: treat as a miss
    ├── InvalidRequest         the call itself is wrong; the message names the fix
    ├── NotFound               a lease, session or reservation that is no more
    ├── PreconditionFailed     something must be done first, e.g. a geometry no tier can hold
    ├── PermissionDenied       a socket of another user, another client's lease, another domain's memory
    ├── DataLoss               stored bytes failed their check and were dropped: treat as a miss
    └── ServerBug              the daemon is wrong; its log has the trace

Every one carries what the daemon said in its ErrorDetail: `reason` is a stable name to branch on (the
table is in docs/api.md), `retry_after_s` is 0.0 where a retry is useless. One class per reason was
rejected: handlers differ by family, and new reasons must not break old clients.
"""

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from ..v1 import types_pb2
from ..v1.errors import DETAIL_KEY, InvalidRequest, KvtierError
from ..v1.unreachable import (
    BAD_CREDENTIALS,
    BAD_TARGET,
    CONNECTION_LOST,
    NO_ANSWER,
    NOT_RUNNING,
    SOCKET_DENIED,
    Diagnosis,
)

__all__ = [
    "BAD_CREDENTIALS",
    "BAD_TARGET",
    "BROKEN_ANSWER",
    "CLIENT_REASONS",
    "CONNECTION_LOST",
    "DETAIL_KEY",
    "NOT_RUNNING",
    "NO_ANSWER",
    "REJECTS_CALLER",
    "SOCKET_DENIED",
    "DataLoss",
    "DeadlineExceeded",
    "InvalidRequest",
    "KvtierError",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PreconditionFailed",
    "ServerBug",
    "Unavailable",
    "broken_answer",
    "from_detail",
    "from_diagnosis",
    "from_status",
]

BROKEN_ANSWER = "BROKEN_ANSWER"
#: Reasons that hold for every call of this process until files, groups or the policy change.
REJECTS_CALLER = frozenset((SOCKET_DENIED, BAD_CREDENTIALS, BAD_TARGET, "NOT_AUTHENTICATED", "NO_TENANT"))
#: Reasons that only a client gives, of a daemon that was reached: condition and recovery; see docs/api.md.
CLIENT_REASONS: dict[str, tuple[str, str]] = {
    BROKEN_ANSWER: (
        "an answer of the daemon is malformed or contradicts its call; the connection was closed",
        "treat as a miss; install the same version of kvtier on both sides, or look at the daemon's log",
    ),
    "STAGING_FULL": (
        "the client's staging extent has no room for a buffer or for the pieces of a put",
        "release staging buffers, or raise Limits.staging_bytes",
    ),
    "VIEWS_IN_USE": (
        "arrays or tensors that read the daemon's memory are still referenced when their lease ends",
        "the lease has ended: discard them; copy what is kept (`Fragment.copy()`) before the lease ends",
    ),
    "NOT_ARRIVED": (
        "a fragment of a lease is read before it is in memory",
        "iterate over the lease, or call `wait()`",
    ),
    "NO_ADDRESS_SPACE": (
        "this process cannot map an extent of shared memory",
        "raise `ulimit -v` or vm.max_map_count; treat as a miss",
    ),
    "GIVEN_UP": ("another task of this process has ended the call", "treat as a miss"),
    "VERSION_MISMATCH": (
        "the daemon's shared index has a layout that this client does not know",
        "install the same version of kvtier on both sides",
    ),
    "BAD_OPTION": ("an option of a runtime's plug-in is malformed or unknown", "fix the named option"),
    "UNSUPPORTED_RUNTIME": (
        "a runtime's plug-in does not know the installed version of the runtime",
        "install a version that the message names",
    ),
}


class Unavailable(KvtierError):
    """The daemon does not answer, or drains. Recompute; the next call reconnects by itself."""


class Overloaded(KvtierError):
    """No room, or a bounded queue is full. Back off `retry_after_s`, or do without."""


class DeadlineExceeded(KvtierError):
    """The daemon ran out of the caller's time. Treat as a miss."""


class NotFound(KvtierError):
    """The lease, session or reservation is no more."""


class PreconditionFailed(KvtierError):
    """Something must be done first; the message says what."""


class PermissionDenied(KvtierError):
    """The daemon's socket, the lease, extent or namespace belongs to another user or client."""


class DataLoss(KvtierError):
    """Stored bytes failed their check and were dropped. Treat as a miss."""


class ServerBug(KvtierError):
    """The daemon itself is wrong. Its log has the trace."""


# gRPC status code (its number) -> class. Numbers, so that grpc need not be imported to read a frame.
_BY_CODE: dict[int, type[KvtierError]] = {
    1: Unavailable,  # CANCELLED: the daemon is stopping
    3: InvalidRequest,
    4: DeadlineExceeded,
    5: NotFound,
    6: PreconditionFailed,  # ALREADY_EXISTS
    7: PermissionDenied,
    8: Overloaded,
    9: PreconditionFailed,
    10: PreconditionFailed,  # ABORTED
    11: InvalidRequest,  # OUT_OF_RANGE
    14: Unavailable,
    15: DataLoss,
    16: PermissionDenied,  # UNAUTHENTICATED
}


def broken_answer(what: str) -> Unavailable:
    """Return (not raise) the exception for an answer that must not be believed.

    Drivers close the connection of the operation that raises it.
    """
    return Unavailable(f"broken answer: {what}; the connection was closed", reason="BROKEN_ANSWER")


def from_detail(packed: bytes) -> KvtierError:
    """Return (not raise) the exception that `packed`, a serialized ErrorDetail, describes."""
    try:
        detail = types_pb2.ErrorDetail.FromString(packed)
    except DecodeError:
        return broken_answer("an error without words")
    family = _BY_CODE.get(detail.code, ServerBug)
    return family(
        detail.message,
        reason=detail.reason or "UNKNOWN",
        retry_after_s=detail.retry_after_ms / 1000,
        metadata=detail.metadata,
    )


def from_diagnosis(diagnosis: Diagnosis) -> KvtierError:
    """Return (not raise) the exception for a connection that could not be made."""
    families: dict[str, type[KvtierError]] = {
        SOCKET_DENIED: PermissionDenied,
        BAD_CREDENTIALS: InvalidRequest,
        BAD_TARGET: InvalidRequest,
    }
    return families.get(diagnosis.reason, Unavailable)(diagnosis.message, reason=diagnosis.reason)


def from_status(code: int, message: str, trailing: Mapping[str, bytes | str]) -> KvtierError:
    """Return the exception for a gRPC status; `trailing` is its metadata, where the detail travels."""
    packed = trailing.get(DETAIL_KEY)
    if isinstance(packed, bytes):
        return from_detail(packed)
    if code == 4:
        return Unavailable(f"no answer in time ({message})", reason=NO_ANSWER)
    reason = CONNECTION_LOST if _BY_CODE.get(code) is Unavailable else "UNKNOWN"
    return _BY_CODE.get(code, ServerBug)(message, reason=reason)
