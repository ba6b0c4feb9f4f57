"""Every operating error of the daemon: one exception tree and one table.

    ApplianceError                  a call is refused; `reason` is a row of the table below
    ├── CallerError                 the call is wrong: sent again as it is, it fails again
    ├── UnknownError                the call names something the daemon does not know (any more)
    ├── BusyError                   no room or no time: retry as told, or do without
    ├── AccessError                 the caller proved no identity, or may not do this
    ├── UnavailableError            the daemon is leaving
    └── BugError                    the daemon itself is wrong
    StartError                      the daemon cannot start; the message names the setting to change

The table REASONS is the only place where a reason meets its gRPC code. The planner refuses by reason
(it knows no gRPC), both transports translate here, and docs/api.md is printed from it, so code, wire and
documentation cannot disagree. A class per reason was rejected: programs branch on the reason anyway,
people on the family.
"""

from collections.abc import Mapping
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from ..tiers.base import Cause, CopyError
from ..v1 import types_pb2
from ..v1.errors import DETAIL_KEY
from .core.results import Refusal

#: Trailing metadata that gRPC's own retries obey: milliseconds to wait, or -1 where a retry is useless.
PUSHBACK_KEY = "grpc-retry-pushback-ms"
STATUS_KEY = "grpc-status-details-bin"  # where gRPC's own tools look for google.rpc.Status
ERROR_DOMAIN = "kvtier"


class StartError(Exception):
    """The daemon cannot start. The message names what to change."""


class MemoryStartError(StartError):
    """The host refused memory to a start. It may be held for the tiers in another form."""


class ApplianceError(Exception):
    """A call is refused. `message` says the fix; `retry_after_s` is 0 when a retry is useless."""

    def __init__(
        self,
        reason: str,
        message: str,
        retry_after_s: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        assert reason in REASONS, f"{reason} is not in the error table"
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})


class CallerError(ApplianceError):
    """The call is wrong: sent again as it is, it fails again."""


class UnknownError(ApplianceError):
    """The call names something the daemon does not know, or no longer knows."""


class BusyError(ApplianceError):
    """No room or no time: retry after `retry_after_s`, or recompute."""


class AccessError(ApplianceError):
    """The caller proved no identity, or may not do this."""


class UnavailableError(ApplianceError):
    """The daemon is leaving; recompute, or ask its successor."""


class BugError(ApplianceError):
    """The daemon itself is wrong. Its log has the trace."""


class ErrorReason(NamedTuple):
    """One line of the table: when it happens, what it is called, what to do."""

    code: grpc.StatusCode
    family: type[ApplianceError]
    condition: str
    recovery: str


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_RANGE = grpc.StatusCode.OUT_OF_RANGE
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_NOT_FOUND = grpc.StatusCode.NOT_FOUND
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

REASONS: dict[str, ErrorReason] = {
    "BAD_KEY": ErrorReason(
        _INVALID,
        CallerError,
        "prefix hashes are missing or not whole 32-byte strides",
        "fix the caller; do not retry",
    ),
    "BAD_REQUEST": ErrorReason(
        _INVALID,
        CallerError,
        "a field is missing, malformed or contradicts another",
        "fix the caller; do not retry",
    ),
    "BAD_NAMESPACE": ErrorReason(
        _INVALID, CallerError, "a namespace's digest or geometry is out of range", "fix the named field"
    ),
    "UNKNOWN_PROFILE": ErrorReason(
        _PRECONDITION,
        UnknownError,
        "a namespace names a compression profile that the daemon does not have, or one of another model",
        "put the profile into the directory compression.profiles and reload, or register without it",
    ),
    "NOT_ENCRYPTED": ErrorReason(
        _PRECONDITION,
        CallerError,
        "a tenant with records that are not encrypted is to be erased: no key can be destroyed; or a host "
        "that encrypts is asked by one that stores in plain",
        "set encryption.master_key and restart; what was stored before stays on the device until overwritten",
    ),
    "BAD_SPAN": ErrorReason(
        _INVALID,
        CallerError,
        "a span leaves the caller's staging extent, or spans and blocks differ in number or size",
        "fix the caller; do not retry",
    ),
    "TOO_MANY_BLOCKS": ErrorReason(
        _INVALID, CallerError, "more blocks in one call than GetServerInfo allows", "split the call"
    ),
    "TOO_LARGE": ErrorReason(
        _INVALID,
        CallerError,
        "a put exceeds what one may carry, or a request 512 KiB, bulk data apart",
        "split it",
    ),
    "LEASE_TTL_TOO_LARGE": ErrorReason(_RANGE, CallerError, "a TTL above the limit", "ask for less"),
    "UNKNOWN_NAMESPACE": ErrorReason(
        _PRECONDITION,
        UnknownError,
        "the namespace id was not given out in this life of the daemon, or not to this domain",
        "register the namespace, then retry",
    ),
    "LAYOUT_MISMATCH": ErrorReason(
        _PRECONDITION,
        UnknownError,
        "no tier can hold a fragment of this geometry",
        "lower layers_per_group, or raise tiers.dram.extent",
    ),
    "UNKNOWN_CLIENT": ErrorReason(
        _PRECONDITION,
        UnknownError,
        "the client never opened, closed, or was silent longer than its TTL",
        "open again; everything it held was given back",
    ),
    "UNKNOWN_RESERVATION": ErrorReason(
        _NOT_FOUND, UnknownError, "the reservation ended: committed, aborted or timed out", "reserve again"
    ),
    "LEASE_EXPIRED": ErrorReason(
        _NOT_FOUND, UnknownError, "the lease is unknown or has ended", "discard what was read; acquire again"
    ),
    "UNKNOWN_EXTENT": ErrorReason(
        _NOT_FOUND,
        UnknownError,
        "the extent does not exist or belongs to another isolation domain",
        "ask only for extents that an answer named",
    ),
    "BAD_PAGES": ErrorReason(
        _INVALID,
        CallerError,
        "registered pages that cannot be what they are said to be, or a page or event that is not registered",
        "fix the named field",
    ),
    "NO_DEVICE": ErrorReason(
        _PRECONDITION,
        UnknownError,
        "the daemon cannot reach the device that pages lie on",
        "get and put through shared memory",
    ),
    "UNKNOWN_PAGES": ErrorReason(
        _NOT_FOUND, UnknownError, "the pages are not registered (any more)", "register them, then retry"
    ),
    "BAD_TIER": ErrorReason(
        _INVALID, CallerError, "the tier cannot do what is asked of it", "name a tier that the message names"
    ),
    "NOTHING_THERE": ErrorReason(
        _NOT_FOUND, UnknownError, "nothing is known under this name (Inspect, GetStory)", "check the name"
    ),
    "TIER_FULL": ErrorReason(
        _EXHAUSTED,
        BusyError,
        "no room, and nothing that may be evicted",
        "back off as told, or skip the put",
    ),
    "SOURCE_FAILED": ErrorReason(
        grpc.StatusCode.UNAVAILABLE,
        UnavailableError,
        "an object store that hosts share did not do what an administrator asked for",
        "do it again when the store answers; the message says how",
    ),
    "DISK_FAILED": ErrorReason(
        grpc.StatusCode.UNAVAILABLE,
        UnavailableError,
        "the disk of tier nvme did not take what an administrator asked for",
        "make the file that the message names writable, then do it again",
    ),
    "TOO_MANY_IN_FLIGHT": ErrorReason(
        _EXHAUSTED, BusyError, "a queue has reached its limit", "back off as told, or do without"
    ),
    "TOO_MANY_CLIENTS": ErrorReason(_EXHAUSTED, BusyError, "the limit on clients is reached", "close some"),
    "TOO_MANY_NAMESPACES": ErrorReason(
        _EXHAUSTED,
        BusyError,
        "the tenant's share of namespaces is used up by those with blocks",
        "ask again: one unused for 10 minutes is emptied; use fewer, or evict those of old models",
    ),
    "QUOTA_EXCEEDED": ErrorReason(
        _EXHAUSTED,
        BusyError,
        "the tenant has used up what it may take",
        "back off as told, or do without; an administrator may raise `tenants.NAME.quota`",
    ),
    "NOT_AUTHENTICATED": ErrorReason(
        grpc.StatusCode.UNAUTHENTICATED,
        AccessError,
        "the caller proved no identity: an unknown token, TLS below 1.3, a way around the socket",
        "fix the credentials; do not retry",
    ),
    "NO_TENANT": ErrorReason(
        grpc.StatusCode.PERMISSION_DENIED,
        AccessError,
        "there are tenants, and the caller belongs to none",
        "name its identity under one of `tenants`",
    ),
    "NOT_ADMIN": ErrorReason(
        grpc.StatusCode.PERMISSION_DENIED,
        AccessError,
        "AdminService and EventsService are for administrators",
        "name the identity in `access.admin`",
    ),
    "NOT_A_HOST": ErrorReason(
        grpc.StatusCode.PERMISSION_DENIED,
        AccessError,
        "PeerService is for the other hosts of the fleet",
        "set `peers` on both hosts; with TLS the caller's certificate needs `peers.certificate_name`",
    ),
    "BAD_POLICY": ErrorReason(
        _INVALID,
        CallerError,
        "a policy is malformed, or asks for what cannot be; the message has file, line, key and fix",
        "fix the named setting; the policy before it stays in force",
    ),
    "NEEDS_RESTART": ErrorReason(
        _PRECONDITION,
        CallerError,
        "a policy changes a setting that a running daemon cannot change; nothing of it is applied",
        "restart the daemon, or leave the named settings as they are",
    ),
    "GENERATION_CONFLICT": ErrorReason(
        grpc.StatusCode.ABORTED,
        CallerError,
        "the policy was made for a generation that is not in force any more",
        "look at the present one, then apply again",
    ),
    "DRAINING": ErrorReason(
        grpc.StatusCode.UNAVAILABLE,
        UnavailableError,
        "the daemon accepts nothing new",
        "recompute, or retry elsewhere",
    ),
    "BUG": ErrorReason(
        grpc.StatusCode.INTERNAL, BugError, "the daemon itself is wrong", "file it, with the log"
    ),
}


def error(reason: str, message: str, retry_after_s: float = 0.0, **metadata: str) -> ApplianceError:
    """Return (not raise) the error of the right family for `reason`, a key of REASONS."""
    return REASONS[reason].family(reason, message, retry_after_s, metadata)


def disk_error(problem: CopyError, undone: str) -> ApplianceError:
    """Return the error for a file beside the segments that was not written; `undone`: what is as before."""
    if problem.cause is Cause.NO_SPACE:
        return error("TIER_FULL", f"{undone}: {problem}; make room beside the segments, then try again")
    return error("DISK_FAILED", f"{undone}: {problem}; make the disk writable, then try again")


def from_refusal(refusal: Refusal) -> ApplianceError:
    """Return the planner's refusal as an exception."""
    return error(refusal.reason, refusal.message, refusal.retry_after_s)


def to_detail(problem: ApplianceError) -> types_pb2.ErrorDetail:
    """Return `problem` as it travels in an error frame and in the trailing metadata."""
    code: int = REASONS[problem.reason].code.value[0]
    return types_pb2.ErrorDetail(
        code=code,
        reason=problem.reason,
        message=problem.message,
        retry_after_ms=round(problem.retry_after_s * 1000),
        metadata=problem.metadata,
    )


def to_status(problem: ApplianceError) -> status_pb2.Status:
    """Return `problem` as google.rpc.Status with ErrorInfo, and RetryInfo when a retry can help."""
    info = error_details_pb2.ErrorInfo(reason=problem.reason, domain=ERROR_DOMAIN, metadata=problem.metadata)
    status = status_pb2.Status(code=REASONS[problem.reason].code.value[0], message=problem.message)
    status.details.append(_packed(info))
    if problem.retry_after_s > 0:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(problem.retry_after_s * 1000))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def trailing_metadata(problem: ApplianceError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the entries that carry the error's details beside a gRPC status."""
    retry_ms = round(problem.retry_after_s * 1000) if problem.retry_after_s > 0 else -1
    return (
        (PUSHBACK_KEY, str(retry_ms)),
        (DETAIL_KEY, to_detail(problem).SerializeToString()),
        (STATUS_KEY, to_status(problem).SerializeToString()),
    )


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
