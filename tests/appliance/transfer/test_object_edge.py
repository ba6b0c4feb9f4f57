"""ObjectEdge over a folder with faults: every instruction ends, whatever the store does."""

import asyncio
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.core.events import CopyFinished, ExportFinished, SourceChanged, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, SearchBundles
from kvtier.appliance.transfer.object_edge import MAX_FAILURES, MAX_IN_FLIGHT
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.tiers.base import Cause
from kvtier.v1.threads import SLICE_S
from tests.test_threads import slice_here_ns

from ..loops import run
from .edge_host import (
    BUNDLE,
    IDENTITY,
    NAMES,
    Host,
    closed,
)

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)


def test_what_is_exported_is_fetched_bit_for_bit(tmp_path: Path) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path), Host(tmp_path)
        await one.open()
        await other.open()
        export = one.filled()
        one.edge.execute(export)
        ended = await one.last(ExportFinished)
        assert ended.is_stored
        assert ended.num_bytes > sum(label.raw_length for _, _, label in export.fragments)
        other.edge.execute(SearchBundles(1, IDENTITY, [NAMES[-1], b"x" * 32]))
        assert await other.last(SourceSearched) == SourceSearched(1, 1, 1)
        fetch = other.fetch()
        other.edge.execute(fetch)
        await other.last(CopyFinished, 2)
        assert [event.copy for event in other.events if isinstance(event, CopyFinished)] == [10, 11]
        items = [item for _, part in fetch.batches for item in part]
        assert other.bytes_at(items) == [label.checksum for _, _, label in export.fragments]
        other.edge.execute(other.filled(2))
        assert await other.last(ExportFinished) == ExportFinished(2, True, 0), "it is there already"
        await closed(one)
        await closed(other)

    run(scene())


def test_a_trial_says_how_soon_the_store_brings_it_back(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        for number in (1, 2):  # stored, then there already
            host.edge.execute(replace(host.filled(number), is_trial=True))
            ended = await host.last(ExportFinished, number)
            assert (ended.is_stored, ended.num_bytes > 0) == (True, number == 1)
            assert ended.read_s > 0
        assert host.edge.status().usage.requests()["get", "ok"] >= 4, "two each"
        await closed(host)

    run(scene())


def test_what_talks_to_the_store_takes_the_processor_from_no_running_thread(tmp_path: Path) -> None:
    policies: list[tuple[int, bool]] = []

    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()

        def noting(method: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any) -> Any:
                policies.append((os.sched_getscheduler(0), slice_here_ns() in (0, round(SLICE_S * 1e9))))
                return method(*arguments)

            return called

        host.store.create = noting(host.store.create)  # type: ignore[method-assign]
        host.store.folders = noting(host.store.folders)  # type: ignore[method-assign]
        host.edge.execute(host.filled())
        assert (await host.last(ExportFinished)).is_stored
        host.edge.bar("acme")
        assert await host.edge.erase("acme") == 0
        await closed(host)

    run(scene())
    assert len(policies) > 1
    assert set(policies) == {(os.SCHED_BATCH, True)}, "stored and erased"


def test_a_defect_ends_the_fetch_that_met_it(tmp_path: Path) -> None:
    async def scene() -> None:
        host, found = Host(tmp_path), []
        await host.open()
        host.edge.execute(host.filled())
        assert (await host.last(ExportFinished)).is_stored
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: found.append(type(context["exception"])))

        def broken() -> None:
            raise ZeroDivisionError

        host.store.before_chunk = broken
        host.edge.execute(host.fetch())
        await host.last(CopyFinished, 2)
        assert list(host.causes().values()) == [{Cause.IO_ERROR}] * 2
        assert found == [ZeroDivisionError]
        assert not host.edge.status().num_in_flight
        await closed(host)

    run(scene())


def test_memory_that_is_not_what_was_put_is_not_stored(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        export = host.filled()
        host.memory.view(export.fragments[3][1], 8)[:] = b"12345678"
        host.edge.execute(export)
        assert not (await host.last(ExportFinished)).is_stored
        await closed(host)

    run(scene())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_memory_of_an_export_is_used_again_unless_a_request_may_still_be_sending_it(tmp_path: Path) -> None:
    payloads: list[memoryview] = []

    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        create = host.store.create

        def failing(key: str, payload: Any) -> bool:
            payloads.append(payload)
            if len(payloads) == 2:
                raise StoreError(StoreProblem.UNREACHABLE)
            return create(key, payload)

        host.store.create = failing  # type: ignore[method-assign]
        for number in range(1, 4):
            host.bundle = BundleBlocks(IDENTITY, b"", 0, [bytes([number]) * 32, *NAMES[1:]][::-1])
            host.edge.execute(host.filled(number))
            assert (await host.last(ExportFinished, number)).is_stored == (number != 2)
        await closed(host)

    run(scene())
    first, failed, last = (np.frombuffer(one, np.uint8) for one in payloads)
    assert np.shares_memory(first, failed)
    assert not np.shares_memory(failed, last)


def test_a_fetch_ends_at_its_deadline_and_writes_no_more(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.edge.execute(host.filled())
        await host.last(ExportFinished)

        def late() -> None:
            host.now = 2.0

        host.store.before_chunk = late
        host.edge.execute(host.fetch(deadline_at=1.0))
        await host.last(CopyFinished, 2)
        assert host.causes() == {10: {Cause.CANCELLED}, 11: {Cause.CANCELLED}}
        await closed(host)

    run(scene())


def test_a_store_that_fails_is_left_alone_until_it_is_back(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.store.problem = StoreProblem.UNREACHABLE
        for number in range(MAX_FAILURES):
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            assert await host.last(SourceSearched, number + 1) == SourceSearched(
                number, 0, -1, is_answered=False
            )
        assert not (await host.last(SourceChanged, 2)).is_open
        host.edge.execute(host.fetch())
        host.edge.execute(ExportBundle(5, BUNDLE, []))
        assert host.causes() == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}, "at once"
        assert not (await host.last(ExportFinished)).is_stored
        assert host.edge.status().problem
        host.store.problem = None
        assert (await host.last(SourceChanged, 3)).is_open
        assert not host.edge.status().problem
        await closed(host)

    run(scene())


def test_a_busy_store_gets_half_as_many_requests(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.store.problem = StoreProblem.BUSY
        for number in range(10):
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            await host.last(SourceSearched, number + 1)
        assert host.edge.status().is_open, "busy is not gone"
        assert host.edge.status().max_in_flight == 1
        host.store.problem = None
        for number in range(10, 10 + MAX_IN_FLIGHT):
            host.edge.execute(SearchBundles(number, IDENTITY, [NAMES[-1]]))
            await host.last(SourceSearched, number + 1)
        assert host.edge.status().max_in_flight == MAX_IN_FLIGHT
        await closed(host)

    run(scene())


def test_a_bundle_that_is_not_there_is_a_miss(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.edge.execute(host.fetch())
        await host.last(CopyFinished, 2)
        assert host.causes() == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}
        assert host.edge.status().is_open
        await closed(host)

    run(scene())


def test_stopping_waits_for_the_threads(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        host.edge.execute(host.filled())
        await host.last(ExportFinished)
        host.edge.execute(host.fetch())
        await closed(host)
        host.edge.execute(host.fetch())  # nothing happens any more
        with pytest.raises(StoreError, match="this daemon is ending"):
            await host.edge.erase("acme")

    run(scene())
