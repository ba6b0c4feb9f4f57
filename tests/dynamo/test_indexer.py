"""Dynamo's own indexer counts what kvtier holds: by the engine's events, and by the daemon's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..vllm.unit.announcing_scene import NAMES, TOKENS, demote
from .services import Indexer, PublishingEngine, Stream, low_half, stored

ALL = len(TOKENS)
SHORT = [low_half(name) for name in NAMES]

Start = Callable[..., PublishingEngine]


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    with Indexer(tmp_path_factory.mktemp("indexer")) as made:
        yield made


@pytest.fixture
def start(tmp_path: Path, indexer: Indexer) -> Iterator[Start]:
    """Start an engine with a daemon of its own, which the indexer listens to as `worker`."""
    engines: list[PublishingEngine] = []

    def make(worker: int, **sections: Any) -> PublishingEngine:
        stream = Stream(tmp_path / f"engine-{worker}")
        indexer.register(worker, stream.endpoint)
        stream.until_heard()
        engines.append(PublishingEngine(tmp_path, stream, **sections))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def follow(engine: PublishingEngine, indexer: Indexer, worker: int, **wanted: int) -> None:
    """Let the engine publish until it knows as much as the indexer shall, and the indexer does."""
    medium = "CPU" if wanted.get("cpu") else "STORAGE" if wanted.get("disk") else ""
    engine.until(dict.fromkeys(NAMES, medium) if medium else {})
    indexer.until(worker, TOKENS, **wanted)


def test_put_is_cpu_demoted_is_disk_evicted_is_gone(indexer: Indexer, start: Start) -> None:
    engine = start(1)
    engine.put(0)
    engine.announce()
    engine.put(1, NAMES[:1])
    engine.until({NAMES[0]: "CPU"})
    indexer.until(1, TOKENS, cpu=ALL // 4, disk=ALL // 4)  # each tier has what faster ones have, too
    engine.put(1)
    follow(engine, indexer, 1, cpu=ALL, disk=ALL)
    demote(engine)
    follow(engine, indexer, 1, disk=ALL)
    engine.evict("nvme")
    follow(engine, indexer, 1)


def test_a_restart_of_the_daemon(indexer: Indexer, start: Start) -> None:
    """Nothing counts while it is away; then what it brings back, where it is."""
    engine = start(2)
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    follow(engine, indexer, 2, cpu=ALL, disk=ALL)
    demote(engine)
    follow(engine, indexer, 2, disk=ALL)
    engine.stop_daemon()
    follow(engine, indexer, 2)
    engine.start_daemon()
    follow(engine, indexer, 2, disk=ALL)


def test_a_gap_in_the_numbers_loses_nothing_that_follows(indexer: Indexer, start: Start) -> None:
    engine = start(3)
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    engine.stream.number += 7
    follow(engine, indexer, 3, cpu=ALL, disk=ALL)


def test_two_data_parallel_ranks_count_once(indexer: Indexer, tmp_path: Path) -> None:
    """Two engines of one worker at one daemon announce the same blocks."""
    streams = [Stream(tmp_path / f"rank-{rank}", rank) for rank in (0, 1)]
    for rank, stream in enumerate(streams):
        indexer.register(4, stream.endpoint, rank)
        stream.until_heard()
    first = PublishingEngine(tmp_path, streams[0])
    second = PublishingEngine(tmp_path, streams[1], served=first.served)
    try:
        for rank in (0, 1):
            first.put(rank)
        for engine in (first, second):
            engine.announce()
            engine.until(dict.fromkeys(NAMES, "CPU"))
        indexer.until(4, TOKENS, cpu=ALL, disk=ALL)
        demote(first)
        first.evict("nvme")
        for engine in (first, second):
            engine.until({})
        indexer.until(4, TOKENS)
    finally:
        second.agent.close()
        streams[1].close()
        first.close()


def test_the_daemon_s_own_stream(indexer: Indexer, start: Start, tmp_path: Path) -> None:
    """Its events have no tokens, so it adds nothing; what it takes away, and its restarts, are understood.

    It publishes for rank 0 of the worker; Dynamo wants another rank for a second endpoint.
    """
    endpoint = f"ipc://{tmp_path}/daemon"
    engine = start(5, observe={"http": "off", "kv_events": endpoint})
    indexer.register(5, endpoint, rank=77, replay_endpoint=f"{endpoint}.replay")
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    follow(engine, indexer, 5, cpu=ALL, disk=ALL)
    engine.agent.close()  # from here on the daemon alone tells of changes
    demote(engine)
    indexer.until(5, TOKENS)
    engine.stream.send(stored(SHORT, list(TOKENS)))
    indexer.until(5, TOKENS, cpu=ALL, disk=ALL)
    engine.stop_daemon()
    engine.start_daemon()  # AllBlocksCleared, with a number that is no old one
    indexer.until(5, TOKENS)


@pytest.mark.parametrize(
    ("worker", "event"),
    [
        (101, stored(SHORT, list(TOKENS), ownership="kvtier")),
        (102, {**stored([], list(TOKENS)), "block_hashes": NAMES}),
        (103, stored(SHORT, [])),
        (104, stored(SHORT, list(TOKENS), locality="REMOTE")),
        (105, stored(SHORT, list(TOKENS), medium="OBJECT")),
    ],
    ids=["owner", "names of 32 bytes", "no tokens", "remote", "unknown medium"],
)
def test_what_the_indexer_drops(indexer: Indexer, tmp_path: Path, worker: int, event: dict[str, Any]) -> None:
    """Why the events are as they are. If a later Dynamo takes one of these: docs/integrations/routers.md."""
    stream = Stream(tmp_path / "stream")
    indexer.register(worker, stream.endpoint)
    stream.until_heard()
    stream.send(event)
    others = [number + 1 for number in TOKENS]
    stream.send(stored([number ^ 1 for number in SHORT], others))  # behind it, so that it was looked at
    indexer.until(worker, others, cpu=ALL, disk=ALL)
    assert indexer.counted(worker, TOKENS) == {"gpu": 0, "cpu": 0, "disk": 0}
    stream.close()
