"""ObjectEdge over a store that misbehaves: no wrong byte, every instruction ends, no restart is needed."""

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.appliance.core.events import CopyFinished, ExportFinished, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, SearchBundles
from kvtier.sources.objects.store import StoreLimits
from kvtier.tiers.base import Cause
from kvtier.tiers.block import NamespaceIdentity
from tests.sources.objects.bundles import verify_bundle
from tests.sources.objects.s3_server import (
    S3Answer,
    S3Request,
    S3Server,
    StoredObject,
    error,
    late,
)

from ..loops import run
from .edge_host import DEADLINE_S, GEOMETRY, IDENTITY, MASTER, NAMES, RED, Host, closed

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

URL = "s3://bucket/fleet"
#: A request that is held up ends soon.
SHORT = StoreLimits(connect_s=1.0, idle_s=1.0, request_s=2.0, num_retries=1, retry_s=1.0)
OTHER_NAMES = [name[::-1] for name in NAMES]
OTHER_MODEL = NamespaceIdentity(b"o" * 32, GEOMETRY)
DAY_S = 86_400.0


async def export(host: Host, number: int = 1) -> ExportBundle:
    """Export a host's bundle to a store that is well; return what was exported."""
    await host.open()
    work = host.filled(number)
    host.edge.execute(work)
    assert (await host.last(ExportFinished)).is_stored
    return work


async def fetch(host: Host, exported: ExportBundle, copy: int = 10, first: int = 0) -> set[Cause | None]:
    """Fetch a bundle; return how its fragments ended. What landed is what was exported."""
    work = host.fetch(copy=copy, first=first)
    host.edge.execute(work)
    await host.until(lambda: {copy, copy + 1} <= host.causes().keys())
    wanted = {(label.prefix_hash, label.group): label.checksum for _, _, label in exported.fragments}
    ended = {event.copy: event.outcomes for event in host.events if isinstance(event, CopyFinished)}
    for number, items in work.batches:
        for item, outcome in zip(items, ended[number], strict=True):
            if outcome.cause is None:
                assert host.bytes_at([item]) == [wanted[item.label.prefix_hash, item.label.group]]
    return {outcome.cause for number, _ in work.batches for outcome in ended[number]}


async def recovered(host: Host, exported: ExportBundle) -> None:
    """Fetch until all of it lands, as it does once the store is looked at again."""
    async with asyncio.timeout(DEADLINE_S):
        for copy in range(20, 20 + 20, 2):
            await is_open(host)
            if await fetch(host, exported, copy) == {None}:
                return
    raise AssertionError("the store is well, and its bundle does not come")


async def stored_again(host: Host, server: S3Server, work: ExportBundle, num_objects: int) -> None:
    """Export until the store has so many objects, as it does some time after it is well."""
    number = 100
    async with asyncio.timeout(DEADLINE_S):
        while len(server.objects) < num_objects:
            await is_open(host)
            number, host.now = number + 1, host.now + 1
            before = sum(isinstance(one, ExportFinished) for one in host.events)
            host.edge.execute(replace(work, export=number))
            await host.last(ExportFinished, before + 1)
            await asyncio.sleep(0)


async def is_open(host: Host) -> None:
    """Wait until the store is asked again."""
    await host.until(lambda: host.edge.status().is_open)


# --------------------------------------------------------------------------------------- fetches

Spoil = Callable[[S3Server, str], None]


def answers(operation: str, answer: S3Answer) -> Spoil:
    """Return what lets a server answer one operation, or `all`, with this."""

    def spoil(server: S3Server, key: str) -> None:
        server.refuse = lambda request: answer if operation in ("all", request.operation) else None

    return spoil


def alters(number: int, alter: Callable[[S3Answer], S3Answer]) -> Spoil:
    """Return what lets a server alter the answers to gets: the `number`th one, or all (-1)."""

    def spoil(server: S3Server, key: str) -> None:
        before = server.count("get")

        def change(request: S3Request, answer: S3Answer) -> S3Answer:
            is_it = request.operation == "get" and number in (-1, server.count("get") - before)
            return alter(answer) if is_it else answer

        server.change = change

    return spoil


def stores(change: Callable[[bytes], bytes]) -> Spoil:
    """Return what changes the stored object."""

    def spoil(server: S3Server, key: str) -> None:
        server.objects[key] = StoredObject(change(server.objects[key].data), time.time())

    return spoil


def between_head_and_payloads(then: Callable[[S3Server, str], object]) -> Spoil:
    """Return what changes a store when the head of an object was read."""

    def spoil(server: S3Server, key: str) -> None:
        def change(request: S3Request, answer: S3Answer) -> S3Answer:
            if request.operation == "get":
                then(server, key)
            return answer

        server.change = change

    return spoil


def no_bucket(server: S3Server, key: str) -> None:
    server.has_bucket = False


def held_up(server: S3Server, key: str) -> None:
    """Send no answer for as long as a test takes."""
    server.change = lambda request, answer: late(answer, threading.Event())


def swapped(server: S3Server, key: str) -> None:
    """Let the bundle of another key stand under this one."""
    server.objects[key] = next(one for name, one in server.objects.items() if name != key)


def flip(at: int) -> Callable[[bytes], bytes]:
    """Return what inverts a bit of one byte."""
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 or len(data) :]


def body(alter: Callable[[bytes], bytes]) -> Callable[[S3Answer], S3Answer]:
    """Return what alters the body of an answer."""
    return lambda answer: replace(answer, body=alter(answer.body))


def reset(answer: S3Answer) -> S3Answer:
    return replace(answer, reset_at=len(answer.body) // 2)


IO, GONE, SHORT_ONE = Cause.IO_ERROR, Cause.SOURCE_GONE, Cause.SHORT_TRANSFER
IDENTITY_, CHECKSUM = Cause.WRONG_IDENTITY, Cause.WRONG_CHECKSUM
FETCH_FAULTS: dict[str, tuple[Spoil, set[Cause | None]]] = {
    "reset once in the head": (alters(1, reset), {None}),
    "reset once in the payloads": (alters(2, reset), {None}),
    "reset always": (alters(-1, reset), {IO}),
    "reset before an answer": (answers("get", S3Answer(0)), {IO}),
    "503 with Retry-After": (answers("all", error(503, "SlowDown", Retry_After="3600")), {IO}),
    "429": (answers("all", error(429, "TooManyRequests")), {IO}),
    "500": (answers("all", error(500, "InternalError")), {IO}),
    "409": (answers("get", error(409, "OperationAborted")), {IO}),
    "412": (answers("get", error(412, "PreconditionFailed")), {IO}),
    "no answer": (held_up, {IO}),
    "credentials revoked": (answers("all", error(403, "InvalidAccessKeyId")), {IO}),
    "bucket deleted": (no_bucket, {IO}),
    "bucket deleted while it is read": (between_head_and_payloads(no_bucket), {IO}),
    "object deleted": (lambda server, key: server.objects.clear(), {GONE}),
    "epoch ends while it is read": (
        between_head_and_payloads(lambda server, key: server.objects.pop(key, None)),
        {SHORT_ONE},
    ),
    "another bundle comes while it is read": (between_head_and_payloads(swapped), {CHECKSUM}),
    "swapped": (swapped, {IDENTITY_}),
    "cut in the head": (stores(lambda data: data[:100]), {IDENTITY_}),
    "cut in the payloads": (stores(lambda data: data[: len(data) * 2 // 3]), {None, SHORT_ONE}),
    "empty": (stores(lambda data: b""), {GONE}),
    "longer": (stores(lambda data: data + bytes(4096)), {None}),
    "a bit of the head": (stores(flip(200)), {IDENTITY_}),
    "a bit of the last payload": (stores(flip(-1)), {None, CHECKSUM}),
    "zeros": (stores(lambda data: bytes(len(data))), {IDENTITY_}),
    "a bit on the way, in the head": (alters(1, body(flip(50))), {IDENTITY_}),
    "a bit on the way, in the payloads": (alters(2, body(flip(0))), {None, CHECKSUM}),
    "other bytes than asked for": (alters(2, body(lambda data: data[1:] + data[:1])), {CHECKSUM}),
    "fewer bytes than asked for": (alters(2, body(lambda data: data[:-1])), {None, IO, SHORT_ONE}),
    "the range is ignored": (alters(2, lambda answer: replace(answer, status=200)), {IO}),
    "no S3 at all": (answers("all", S3Answer(200, b"<html>log in</html>")), {IO, IDENTITY_}),
}


#: What differs where head and payloads come in one request.
IN_ONE_REQUEST: dict[str, tuple[Spoil, set[Cause | None]]] = {
    **{
        case: (lambda server, key: None, {None})
        for case in ("bucket deleted while it is read", "epoch ends while it is read")
    },
    "another bundle comes while it is read": (between_head_and_payloads(swapped), {None}),
    "reset once in the payloads": (alters(1, lambda answer: replace(answer, reset_at=-1)), {None}),
    "a bit on the way, in the payloads": (alters(1, body(flip(-1))), {None, CHECKSUM}),
    "other bytes than asked for": (alters(1, body(lambda data: data[1:] + data[:1])), {IDENTITY_}),
    "fewer bytes than asked for": (alters(1, body(lambda data: data[:-1])), {None, IO, SHORT_ONE}),
    "the range is ignored": (alters(1, lambda answer: replace(answer, status=200)), {IO}),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("case", FETCH_FAULTS)
def test_a_fetch_from_a_store_that_misbehaves(case: str, first: int, server: S3Server) -> None:
    """`first`: with block 1 head and payloads are two requests."""
    spoil, causes = FETCH_FAULTS[case] if first or case not in IN_ONE_REQUEST else IN_ONE_REQUEST[case]

    async def scene() -> None:
        one, other = Host(URL), Host(URL, limits=SHORT if spoil is held_up else None)
        exported = await export(one)
        [key] = server.objects
        one.bundle = BundleBlocks(IDENTITY, b"", 0, OTHER_NAMES)
        one.edge.execute(one.filled(2))
        assert (await one.last(ExportFinished, 2)).is_stored
        await other.open()
        well = dict(server.objects)
        spoil(server, key)
        ended = await fetch(other, exported, first=first)
        assert ended == causes or (ended <= causes and case in ("no S3 at all", "fewer bytes than asked for"))
        server.heal()
        server.objects = well
        await recovered(other, exported)
        await closed(one)
        await closed(other)

    run(scene())


def test_a_bundle_of_another_namespace_is_a_miss(server: S3Server) -> None:
    """The names of its blocks are the same; its namespace, in the head, is not."""

    async def scene() -> None:
        one, other = Host(URL), Host(URL, identity=OTHER_MODEL)
        exported = await export(one)
        [key] = server.objects
        await export(other)
        [of_other] = server.objects.keys() - {key}
        server.objects[key] = server.objects[of_other]
        assert await fetch(one, exported) == {Cause.WRONG_IDENTITY}
        await closed(one)
        await closed(other)

    run(scene())


@pytest.mark.parametrize("days", [-400, -5, -1, 1, 2, 5, 400])
@pytest.mark.parametrize("master", [b"", MASTER])
def test_a_clock_that_is_off_by_days(server: S3Server, days: int, master: bytes) -> None:
    """What it stored is found by hosts whose epochs overlap with its own; otherwise it is a miss."""

    async def scene() -> None:
        wrong = Host(URL, master, RED, now_s=lambda: time.time() + days * DAY_S)
        right = Host(URL, master, RED)
        server.clock_s = lambda: time.time() + days * DAY_S  # the same, or nothing would be stored
        exported = await export(wrong)
        server.clock_s = time.time
        await right.open()
        assert await fetch(right, exported) == ({None} if -2 <= days <= 0 else {Cause.SOURCE_GONE})
        right.edge.execute(work := right.filled(2))
        assert (await right.last(ExportFinished)).is_stored
        assert await fetch(right, work, 30) == {None}
        await closed(wrong)
        await closed(right)

    run(scene())


@pytest.mark.parametrize("days", [-5, 5])
def test_with_a_clock_that_is_off_nothing_is_stored_where_no_host_looks(server: S3Server, days: int) -> None:
    async def scene() -> None:
        clock = [days * DAY_S]
        host = Host(URL, now_s=lambda: time.time() + clock[0])
        await host.open()
        host.edge.execute(work := host.filled())
        assert not (await host.last(ExportFinished)).is_stored
        assert not server.objects, "what was stored is deleted"
        where = "behind" if days < 0 else "ahead of"
        assert f"this host's clock is 120.0 hours {where} the store's; set it" in host.edge.status().problem
        clock[0] = 0.0
        await stored_again(host, server, work, 1)
        assert not host.edge.status().problem
        clock[0], stored = days * DAY_S, set(server.objects)
        num_ended = sum(isinstance(one, ExportFinished) for one in host.events)
        host.edge.execute(replace(work, export=9))
        assert not (await host.last(ExportFinished, num_ended + 1)).is_stored, "it jumped later"
        assert set(server.objects) == stored
        await closed(host)

    run(scene())


def test_searches_of_a_store_that_fails_find_nothing_and_say_that_it_is_not_known(server: S3Server) -> None:
    async def scene() -> None:
        host = Host(URL)
        await export(host)
        faults = (error(503, "SlowDown"), error(403, "AccessDenied"), S3Answer(0))
        for number, answer in enumerate(faults):
            server.refuse = lambda request, answer=answer: answer  # type: ignore[misc]
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            assert await host.last(SourceSearched, number + 1) == SourceSearched(
                number, 0, -1, is_answered=False
            )
        await closed(host)

    run(scene())


# --------------------------------------------------------------------------------------- exports


def loses_answers(most: int) -> Spoil:
    """Return what lets a server store objects, and reset connections instead of saying so, so often."""

    def spoil(server: S3Server, key: str) -> None:
        def change(request: S3Request, answer: S3Answer) -> S3Answer:
            return S3Answer(0) if request.operation == "put" and server.count("put") <= most else answer

        server.change = change

    return spoil


def lists_lag(server: S3Server, key: str) -> None:
    """Let no listing show anything."""
    empty = S3Answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    server.refuse = lambda request: empty if request.operation == "list" else None


FULL = error(403, "QuotaExceeded")
EXPORT_FAULTS: dict[str, tuple[Spoil, bool]] = {
    "reset before it is stored": (answers("put", S3Answer(0)), False),
    "reset when it is stored": (loses_answers(1), True),
    "reset whenever it is stored": (loses_answers(99), False),
    "no answer": (held_up, False),
    "503 with Retry-After": (answers("put", error(503, "SlowDown", Retry_After="3600")), False),
    "500": (answers("put", error(500, "InternalError")), False),
    "409": (answers("put", error(409, "ConditionalRequestConflict")), False),
    "412 for nothing": (answers("put", error(412, "PreconditionFailed")), True),
    "full": (answers("put", FULL), False),
    "507": (answers("put", error(507, "InsufficientStorage")), False),
    "credentials revoked": (answers("all", error(403, "InvalidAccessKeyId")), False),
    "bucket deleted": (no_bucket, False),
    "lists that lag": (lists_lag, True),
}


@pytest.mark.parametrize("case", EXPORT_FAULTS)
def test_an_export_to_a_store_that_misbehaves(case: str, server: S3Server) -> None:
    spoil, is_stored = EXPORT_FAULTS[case]

    async def scene() -> None:
        host = Host(URL, limits=SHORT if spoil is held_up else None)
        await host.open()
        spoil(server, "")
        host.edge.execute(work := host.filled())
        assert (await host.last(ExportFinished)).is_stored == is_stored
        for stored in server.objects.values():
            verify_bundle(memoryview(stored.data))
        server.heal()
        await stored_again(host, server, work, 1)
        assert await fetch(host, work) == {None}
        await closed(host)

    run(scene())


@pytest.mark.parametrize("answer", [FULL, error(403, "AccessDenied"), error(501, "NotImplemented")])
def test_where_nothing_can_be_stored_bundles_are_still_fetched(answer: S3Answer, server: S3Server) -> None:
    """A full store, or a right to read only. It is asked ever more rarely, and says why."""

    async def scene() -> None:
        one, host = Host(URL), Host(URL)
        exported = await export(one)
        await host.open()
        answers("put", answer)(server, "")
        host.bundle = BundleBlocks(IDENTITY, b"", 0, OTHER_NAMES)
        work = host.filled()
        for number in range(1, 21):
            host.edge.execute(replace(work, export=number))
            assert not (await host.last(ExportFinished, number)).is_stored
        status = host.edge.status()
        assert status.is_open
        assert status.problem
        assert server.count("put") < 10, "not one of each export"
        host.bundle = one.bundle
        assert await fetch(host, exported) == {None}
        server.heal()
        await stored_again(host, server, work, 2)
        assert not host.edge.status().problem
        await closed(one)
        await closed(host)

    run(scene())


def test_a_bundle_of_an_older_epoch_is_sent_again_where_the_store_cannot_copy(server: S3Server) -> None:
    async def scene() -> None:
        before, host = Host(URL, now_s=lambda: time.time() - DAY_S), Host(URL)
        server.clock_s = lambda: time.time() - DAY_S
        exported = await export(before)
        server.clock_s = time.time
        await host.open()
        answers("copy", error(501, "NotImplemented"))(server, "")
        host.edge.execute(host.filled())
        assert (await host.last(ExportFinished)).num_bytes
        assert len(server.objects) == 2
        assert await fetch(host, exported) == {None}
        await closed(before)
        await closed(host)

    run(scene())
