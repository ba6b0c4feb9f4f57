"""Checks: what a caller may send. Pure functions from wire values to the planner's words.

Each raises CallerError with a message that names the fix. They stand before the planner, so that it can
assert what it relies on.
"""

import math
from collections.abc import Callable, Sequence

from ...policies.costs import (
    LEAST_TOKENS_PER_S,
    MOST_DOUBLING_TOKENS,
    MOST_TOKENS_PER_S,
    PrefillModel,
)
from ...tiers.block import HASH_BYTES, Geometry, NamespaceIdentity, Tier, Urgency
from ...tiers.codecs.streaming import usable_codecs
from ...v1 import kvcache_pb2, types_pb2
from ...v1.conversions import URGENCIES, WireTiers, identity_from_wire
from ...v1.errors import InvalidRequest
from ..core.events import ExpectedPart, RetentionHint
from ..errors import error
from ..persisted.namespace_book import MAX_TEXTS_BYTES

MAX_TEXT = 256  # characters of names, session ids and request ids
MAX_RETENTION = 64  # ranges in one request
MAX_CODECS = 64  # numbers in one request
#: Of a message that asks, bulk data apart: the longest chain, its spans and 1,024 candidates fit.
#: Decoding 4 MiB of empty spans took 160 ms of the event loop.
MAX_REQUEST_BYTES = 512 << 10
#: By call, the tags of the fields that are bulk: decoding them takes little time, whatever they hold.
BULK_TAGS = {"Put": (18, 26), "GetPages": (26,), "PutPages": (26,), "ApplyPolicy": (10,)}
_MAX_FIELDS = 8  # of a message with bulk that are looked at


def encoded(call: str, request: bytes) -> bytes:
    """Return a request, or one message of a put, that may be decoded."""
    num_bytes = len(request)
    if num_bytes > MAX_REQUEST_BYTES and call in BULK_TAGS:
        num_bytes -= _bulk_bytes(request, BULK_TAGS[call])
    if num_bytes > MAX_REQUEST_BYTES:
        message = f"a request of {num_bytes} bytes without bulk data, limit {MAX_REQUEST_BYTES}"
        raise error("TOO_LARGE", f"{message}; split the call")
    return request


def _bulk_bytes(request: bytes, tags: tuple[int, ...]) -> int:
    """Return how many bytes the fields of an encoded message have that begin with one of `tags`."""
    start = num_bytes = 0
    for _ in range(_MAX_FIELDS):
        tag, start = _varint(request, start)
        value, start = _varint(request, start)
        if tag & 7 == 2:  # bytes, a text or a message; `value` is its length
            end = min(start + value, len(request))
            num_bytes += end - start if tag in tags else 0
            start = end
        elif tag & 7 or not tag:  # the end, or a field of another kind than these messages have
            break
    return num_bytes


def _varint(request: bytes, start: int) -> tuple[int, int]:
    """Return the number that is encoded at `start`, and where it ends; 0 past the end."""
    value = 0
    for shift, byte in enumerate(request[start : start + 10]):
        value |= (byte & 127) << 7 * shift
        start += 1
        if byte < 128:
            break
    return value, start


def chain(packed: bytes, max_blocks: int) -> list[bytes]:
    """Return the prefix hashes of `packed` 32-byte strides."""
    num_bytes = len(packed)
    if num_bytes == 0 or num_bytes % HASH_BYTES:
        raise error(
            "BAD_KEY", f"prefix_hashes must be whole 32-byte hashes, at least one; is {num_bytes} bytes"
        )
    if num_bytes > max_blocks * HASH_BYTES:
        raise error(
            "TOO_MANY_BLOCKS", f"{num_bytes // HASH_BYTES} blocks, limit {max_blocks}; split the call"
        )
    return [packed[start : start + HASH_BYTES] for start in range(0, num_bytes, HASH_BYTES)]


def distinct(names: Sequence[bytes]) -> None:
    """Raise CallerError for a chain that names a block twice."""
    if len(set(names)) != len(names):
        raise error("BAD_KEY", "a block stands twice in one chain")


def text(field: str, value: str) -> str:
    """Return a short free text."""
    if len(value) > MAX_TEXT:
        raise error("BAD_REQUEST", f"{field} may have {MAX_TEXT} characters, has {len(value)}")
    return value


def codecs(given: Sequence[int]) -> frozenset[int]:
    """Return the codecs of those given that this daemon has."""
    if len(given) > MAX_CODECS:
        raise error("BAD_REQUEST", f"{len(given)} codecs, limit {MAX_CODECS}; name those that are needed")
    return frozenset(given).intersection(usable_codecs())


def ttl_s(ttl_ms: int, max_s: float) -> float:
    """Return a TTL in seconds; 0 asks for the default."""
    if ttl_ms > max_s * 1000:
        raise error("LEASE_TTL_TOO_LARGE", f"ttl_ms is {ttl_ms}, at most {max_s * 1000:.0f}; ask for less")
    return ttl_ms / 1000


def urgency(value: int) -> Urgency:
    """Return an urgency; unspecified means queued."""
    if value == types_pb2.URGENCY_UNSPECIFIED:
        return Urgency.QUEUED
    found = URGENCIES.get(value)
    if found is None:
        raise error("BAD_REQUEST", f"urgency {value} is not known")
    return found


def expected(
    request: kvcache_pb2.AcquireRequest,
    num_named: int,
    deadline_at: float,
    now: float,
    locate: Callable[[str, int], str | None],
) -> ExpectedPart | None:
    """Return what an acquire of `num_named` blocks waits for; None where that is nothing.

    Nothing is waited for of a host that `locate` does not know by name and epoch."""
    if not request.HasField("expected"):
        return None
    said = request.expected
    source = locate(text("expected.host", said.host), said.epoch)
    if source is None:
        return None
    until = min(deadline_at, now + said.wait_ms / 1000) if said.wait_ms else deadline_at
    return ExpectedPart(min(said.num_blocks or num_named, num_named), until, source)


def retention(given: Sequence[types_pb2.Retention]) -> list[RetentionHint]:
    """Return retention hints; empty ranges and priorities above 100 are refused."""
    if len(given) > MAX_RETENTION:
        raise error("BAD_REQUEST", f"{len(given)} retention ranges, limit {MAX_RETENTION}; merge some")
    for hint in given:
        if hint.priority > 100:
            raise error("BAD_REQUEST", f"retention priority is 0 to 100, is {hint.priority}")
        if hint.end_token and hint.end_token <= hint.first_token:
            raise error("BAD_REQUEST", f"retention range {hint.first_token} to {hint.end_token} is empty")
    return [RetentionHint(h.first_token, h.end_token, h.priority, h.ttl_ms / 1000) for h in given]


def prefill_s(value: float) -> float:
    """Return a measured prefill time; 0 means it was not measured."""
    if not 0.0 <= value < math.inf:
        raise error(
            "BAD_REQUEST", f"prefill_s must be a number of seconds, is {value}; leave it 0 if unknown"
        )
    return value


def prefill_speed(given: types_pb2.PrefillSpeed) -> PrefillModel:
    """Return a stated prefill speed."""
    doubling_tokens = given.doubling_tokens
    is_speed = LEAST_TOKENS_PER_S <= given.tokens_per_s <= MOST_TOKENS_PER_S
    if not is_speed or (doubling_tokens != 0 and not 1.0 <= doubling_tokens <= MOST_DOUBLING_TOKENS):
        raise error(
            "BAD_REQUEST",
            f"prefill.tokens_per_s must be {LEAST_TOKENS_PER_S:g} to {MOST_TOKENS_PER_S:g}, is "
            f"{given.tokens_per_s}; doubling_tokens 0, or 1 to {MOST_DOUBLING_TOKENS:g}, is "
            f"{doubling_tokens}; leave `prefill` out if unknown",
        )
    return PrefillModel(given.tokens_per_s, given.doubling_tokens)


def tier(field: str, value: int, known: WireTiers, default: Tier | None = None) -> Tier:
    """Return one of the tiers `known`; unspecified means `default` where there is one."""
    if value == types_pb2.TIER_UNSPECIFIED and default is not None:
        return default
    found = known.tier(value)
    if found is None:
        names = ", ".join(f"{info.tier} is {info.name}" for info in known.announcement())
        raise error("BAD_REQUEST", f"{field}: tier {value} is not known; {names}")
    return found


def spans(
    given: Sequence[types_pb2.StagingSpan], staging_bytes: int, max_blocks: int
) -> list[tuple[int, int]]:
    """Return (offset, length) of spans that lie inside the staging extent.

    Empty ones may stand for blocks that need no bytes.
    """
    if len(given) > max_blocks:
        raise error("TOO_MANY_BLOCKS", f"{len(given)} spans, limit {max_blocks}; split the call")
    if given and staging_bytes == 0:
        raise error(
            "BAD_SPAN", "this client has no staging extent; attach over the local channel, or use Put"
        )
    checked = []
    for number, span in enumerate(given):
        if span.length > staging_bytes or span.offset > staging_bytes - span.length:
            raise error(
                "BAD_SPAN",
                f"span {number} is {span.length} bytes at {span.offset}, "
                f"outside the staging extent of {staging_bytes} bytes",
            )
        checked.append((span.offset, span.length))
    return checked


def spans_of_blocks(
    given: list[tuple[int, int]], num_blocks: int, geometry: Geometry
) -> list[tuple[int, int]]:
    """Return one span per block, each as long as a block: those given, or the parts of the one given."""
    size = geometry.block_bytes
    if len(given) == 1 and num_blocks > 1 and given[0][1] == num_blocks * size:
        first = given[0][0]
        return [(first + number * size, size) for number in range(num_blocks)]
    if len(given) != num_blocks:
        raise error("BAD_SPAN", f"{len(given)} spans for {num_blocks} blocks; give one per block")
    for number, (_, length) in enumerate(given):
        if length != size:
            raise error("BAD_SPAN", f"span {number} is {length} bytes, a block has {size}")
    return given


def identity(given: types_pb2.NamespaceIdentity, domain: str) -> NamespaceIdentity:
    """Return a namespace's identity in isolation domain `domain`."""
    num_bytes = sum(len(one.encode()) for one in (given.shard, domain, given.geometry.layout))
    if num_bytes > MAX_TEXTS_BYTES:
        message = f"shard, domain and layout may have {MAX_TEXTS_BYTES} bytes together, have {num_bytes}"
        raise error("BAD_NAMESPACE", f"{message}; shorten them, or name a hash in their place")
    try:
        return identity_from_wire(given, domain)
    except InvalidRequest as problem:
        raise error("BAD_NAMESPACE", problem.message) from None
