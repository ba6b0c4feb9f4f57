"""HostCopier over real memory, real staging and a real file."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.tiers.base import Buffer, Cause, Copier, CopyError, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel
from kvtier.tiers.copiers import HostCopier, make_pool
from kvtier.tiers.edges import Transfer
from kvtier.tiers.memory.staging import StagingExtent
from kvtier.tiers.payload import checksum
from tests.tiers.helpers import make_label, make_payload, open_engine, store

LENGTH = 100_000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with make_pool(2) as threads:
        yield threads


class FileStore:
    """A store of records in one file, without a mapping: the smallest tier that must be read."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.fail_with: OSError | CopyError | None = None

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        if self.fail_with:
            raise self.fail_with
        assert os.pwrite(self._fd, payload, place) == label.raw_length
        return label.checksum or checksum(payload)

    def read(self, place: int, label: FragmentLabel, into: Buffer) -> None:
        if os.preadv(self._fd, [into], place) != len(into):
            raise CopyError(Cause.SHORT_TRANSFER)
        if checksum(into) != label.checksum:
            raise CopyError(Cause.WRONG_CHECKSUM)

    def close(self) -> None:
        os.close(self._fd)


class BatchFileStore(FileStore):
    """The same, with batches."""

    num_batches = 0

    def write_batch(self, items: list[Transfer]) -> list[CopyOutcome]:
        self.num_batches += 1
        return [CopyOutcome(None, self.write(*item)) for item in items]

    def read_batch(self, items: list[Transfer]) -> list[CopyOutcome]:
        self.num_batches += 1
        outcomes = []
        for item in items:
            try:
                self.read(*item)
                outcomes.append(CopyOutcome(None))
            except CopyError as error:
                outcomes.append(CopyOutcome(error.cause))
        return outcomes


@pytest.mark.parametrize("length", [4096, LENGTH, 3 << 20])
def test_staging_to_memory(pool: ThreadPoolExecutor, length: int) -> None:
    with open_engine(8, 8 << 20) as (engine, room, _):
        count = 6
        staging = StagingExtent(-(-count * length // 4096) * 4096)
        os.pwrite(staging.descriptor, b"".join(make_payload(n, length) for n in range(count)), 0)
        places = [room.reserve(0, length) or 0 for _ in range(count)]
        items = [CopyItem(n * length, places[n], make_label(n, length)) for n in range(count)]
        copier: Copier = HostCopier(staging, engine, pool)
        outcomes = copier.start(items).result(10)
        assert outcomes == [CopyOutcome(None, checksum(make_payload(n, length))) for n in range(count)]
        for number, place in enumerate(places):
            assert engine.view(place, length) == make_payload(number, length)
        assert HostCopier(staging, engine, pool).run(items) == outcomes, "the same, in this thread"
        staging.close()


def test_one_bad_item_does_not_spoil_the_others(pool: ThreadPoolExecutor) -> None:
    with open_engine() as (engine, room, _):
        staging = StagingExtent(1 << 20)
        os.pwrite(staging.descriptor, make_payload(1, LENGTH), 0)
        places = [room.reserve(0, LENGTH) or 0 for _ in range(3)]
        label = make_label(1, LENGTH)
        items = [
            CopyItem(0, places[0], label),
            CopyItem(1 << 20, places[1], label),
            CopyItem(0, places[2], label),
        ]
        outcomes = HostCopier(staging, engine, pool).start(items).result(10)
        assert [outcome.cause for outcome in outcomes] == [None, Cause.SHORT_TRANSFER, None]
        staging.close()
        outcomes = HostCopier(staging, engine, pool).start(items).result(10)
        assert [outcome.cause for outcome in outcomes] == [Cause.SOURCE_GONE] * 3


def test_memory_to_memory_checks_the_source_before_and_after(pool: ThreadPoolExecutor) -> None:
    with open_engine() as (hot, hot_room, _), open_engine() as (warm, warm_room, _):
        label = replace(make_label(1, LENGTH), checksum=checksum(make_payload(1, LENGTH)))
        source = store(hot, hot_room, label, 1)
        target = warm_room.reserve(0, LENGTH)
        assert target is not None
        copier = HostCopier(hot, warm, pool)
        assert copier.run([CopyItem(source, target, label)]) == [CopyOutcome(None, label.checksum)]
        assert warm.view(target, LENGTH) == make_payload(1, LENGTH)
        other = make_label(2, LENGTH)
        assert copier.run([CopyItem(source, target, other)])[0].cause is Cause.WRONG_IDENTITY

        class Recycling:
            """Writes, while the source's slot gets another fragment."""

            def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
                digest = warm.write(place, label, payload)
                hot.retract(source)
                hot.write(source, other, make_payload(2, LENGTH))
                hot.publish_run([source], [replace(other, checksum=b"c" * 16)])
                return digest

        late = HostCopier(hot, Recycling(), pool).run([CopyItem(source, target, label)])
        assert late[0].cause is Cause.WRONG_IDENTITY


@pytest.mark.parametrize("kind", [FileStore, BatchFileStore])
def test_memory_to_store_and_back(pool: ThreadPoolExecutor, tmp_path: Path, kind: type[FileStore]) -> None:
    cold = kind(tmp_path / "records")
    with open_engine() as (engine, room, _):
        labels = [
            replace(make_label(n, LENGTH), checksum=checksum(make_payload(n, LENGTH))) for n in range(4)
        ]
        sources = [store(engine, room, label, n) for n, label in enumerate(labels)]
        down = [
            CopyItem(p, n * LENGTH, label) for n, (p, label) in enumerate(zip(sources, labels, strict=True))
        ]
        done = [CopyOutcome(None, label.checksum) for label in labels]
        assert HostCopier(engine, cold, pool).start(down).result(10) == done
        targets = [room.reserve(0, LENGTH) or 0 for _ in labels]
        up = [CopyItem(n * LENGTH, place, labels[n]) for n, place in enumerate(targets)]
        assert HostCopier(cold, engine, pool).start(up).result(10) == done
        for number, place in enumerate(targets):
            assert engine.view(place, LENGTH) == make_payload(number, LENGTH)
        spoilt = [*up[:2], CopyItem(10 * LENGTH, targets[2], labels[2]), CopyItem(7, targets[3], labels[3])]
        causes = [outcome.cause for outcome in HostCopier(cold, engine, pool).run(spoilt)]
        assert causes == [None, None, Cause.SHORT_TRANSFER, Cause.WRONG_CHECKSUM]
    if isinstance(cold, BatchFileStore):
        assert cold.num_batches == 3
    cold.close()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "full"), Cause.NO_SPACE),
        (OSError(errno.EIO, "broken"), Cause.IO_ERROR),
        (CopyError(Cause.TIER_OFFLINE), Cause.TIER_OFFLINE),
    ],
)
def test_errors_become_causes(
    pool: ThreadPoolExecutor, tmp_path: Path, error: OSError | CopyError, cause: Cause
) -> None:
    cold = FileStore(tmp_path / "records")
    cold.fail_with = error
    with open_engine() as (engine, room, _):
        label = make_label(1, LENGTH)
        item = CopyItem(store(engine, room, label, 1), 0, label)
        assert HostCopier(engine, cold, pool).start([item]).result(10) == [CopyOutcome(cause)]
    cold.close()


def test_a_bug_reaches_the_caller(pool: ThreadPoolExecutor) -> None:
    with open_engine() as (engine, room, _):
        staging = StagingExtent(1 << 20)
        label = make_label(1, LENGTH)
        published = store(engine, room, label, 1)
        with pytest.raises(AssertionError, match="retracted"):
            HostCopier(staging, engine, pool).start([CopyItem(0, published, label)]).result(10)
        staging.close()


def test_cancelling_does_not_end_a_copy_early(pool: ThreadPoolExecutor) -> None:
    gate, begun = threading.Event(), threading.Event()

    class Slow:
        def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
            begun.set()
            assert gate.wait(60)
            return checksum(payload)

    staging = StagingExtent(4096)
    future = HostCopier(staging, Slow(), pool).start([CopyItem(0, 0, make_label(1, 4096))])
    assert begun.wait(60)
    assert not future.cancel()
    assert not future.done(), "its places must not be reused yet"
    gate.set()
    assert future.result(10)[0].cause is None
    staging.close()


def test_after_shutdown_everything_is_cancelled() -> None:
    threads = make_pool(1)
    threads.shutdown()
    staging = StagingExtent(4096)
    with open_engine() as (engine, room, _):
        place = room.reserve(0, 4096)
        assert place is not None
        items = [CopyItem(0, place, make_label(1, 4096))]
        assert HostCopier(staging, engine, threads).start(items).result(10) == [CopyOutcome(Cause.CANCELLED)]
        assert HostCopier(staging, engine, threads).start([]).result(10) == []
    staging.close()


def test_a_pools_threads_run_before_there_is_work() -> None:
    with make_pool(3, "early"):
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("early"))
        assert names == ["early_0", "early_1", "early_2"]
