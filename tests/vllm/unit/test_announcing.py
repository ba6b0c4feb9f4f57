"""What an engine's listeners are told of blocks, as a real daemon stores, demotes and evicts them."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import AsyncClient, Client, PutOutcome
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.scheduler.agent import Agent
from kvtier.clients.vllm.scheduler.announcer import Announcer, Block, Key
from kvtier.clients.vllm.scheduler.lookups import LookupRequest
from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.channels import open_channel

from ...appliance.conftest import small_settings
from ...appliance.loops import DaemonThread
from .engine import HASH_TOKENS, hashes_of
from .threads_scene import identities

WAIT_S = 120.0
GROUP = Group(0, 8, 8 // HASH_TOKENS)
HASHES = hashes_of(range(32))
NAMES = GROUP.chain(HASHES)


class Engine:
    """The agent of an engine with two ranks, its listener, and the clients of its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = f"unix://{folder}/k.sock"
        self.served: DaemonThread | None = None
        self.start_daemon()
        self.held: dict[bytes, str] = {}  # medium by name, as a listener has it
        self.announcer = Announcer(2)
        ranks = [identities([GROUP], rank) for rank in (0, 1)]
        options = Options(target=self.target)
        self.agent = Agent(
            options,
            [GROUP],
            ranks,
            lambda: AsyncClient(self.target, name="agent"),
            Counters(),
            announcer=self.announcer,
        )

    def start_daemon(self) -> None:
        """Start a daemon with a cold store, written to while its device is idle."""
        self.served = DaemonThread(small_settings(self.folder, nvme=True, write="idle"))
        self.served.__enter__()

    def stop_daemon(self) -> None:
        if self.served is not None:
            self.served.__exit__(None, None, None)
            self.served = None

    def put(self, rank: int, names: list[bytes] = NAMES) -> None:
        with Client(self.target, name=f"worker {rank}") as client:
            namespace = client.register(identities([GROUP], rank)[0])
            report = client.put(namespace, names, bytes(namespace.block_bytes * len(names)))
            assert set(report.outcomes) <= {PutOutcome.STORED, PutOutcome.DEDUPLICATED}, report

    def announce(self, names: list[bytes] = NAMES) -> None:
        keys = [Key(("", b""), 0, name) for name in names]
        parents = [b"", *names]
        self.agent.announce([Block(key, parents[i], i) for i, key in enumerate(keys)])

    def evict(self, tier: str) -> None:
        """Evict everything from a tier, as `kvtier evict` does."""
        with open_channel(self.target) as channel:
            number = types_pb2.Tier.Value(f"TIER_{tier.upper()}")
            AdminServiceStub(channel).Evict(
                admin_pb2.EvictRequest(tier=number, bytes=1 << 30), timeout=WAIT_S
            )

    def hear(self) -> dict[bytes, str]:
        """Apply what there is to tell, as a listener does; return what it has."""
        changes = self.announcer.take()
        for block, medium in changes.stored:
            self.held[block.key.name] = medium
        for block, medium in [*changes.dropped, *changes.removed]:
            if self.held.get(block.key.name) == medium:
                del self.held[block.key.name]
        return self.held

    def until(self, wanted: dict[bytes, str]) -> None:
        wait_for(lambda: self.hear() == wanted)

    def close(self) -> None:
        self.agent.close()
        self.stop_daemon()


def wait_for(what: Callable[[], object]) -> None:
    pause, deadline_at = threading.Event(), time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_at, "it never came"
        pause.wait(0.01)


def in_medium(medium: str, names: list[bytes] = NAMES) -> dict[bytes, str]:
    return dict.fromkeys(names, medium)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def test_a_block_counts_when_both_ranks_have_it_until_one_has_not(engine: Engine) -> None:
    engine.put(0)
    engine.announce()
    engine.put(1, NAMES[:2])
    engine.until(in_medium("CPU", NAMES[:2]))
    engine.put(1, NAMES)
    engine.until(in_medium("CPU"))
    demote(engine)
    engine.evict("nvme")
    engine.until({})


def test_demotion_and_eviction_are_told(engine: Engine) -> None:
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    engine.until(in_medium("CPU"))
    demote(engine)
    engine.until(in_medium("STORAGE"))
    engine.evict("nvme")
    engine.until({})


def test_a_restart_is_heard_and_what_is_left_is_told_again(engine: Engine) -> None:
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    engine.until(in_medium("CPU"))
    demote(engine)
    engine.until(in_medium("STORAGE"))
    engine.stop_daemon()
    engine.until({})
    engine.start_daemon()
    engine.until(in_medium("STORAGE"))
    engine.evict("nvme")
    engine.until({})


def test_what_was_stored_before_the_engine_came_is_announced_when_it_is_found(engine: Engine) -> None:
    """As after a restart of the engine: the request that finds blocks has their tokens."""
    for rank in (0, 1):
        engine.put(rank)
    demote(engine)
    asked = engine.agent.ask(LookupRequest("session", tuple(HASHES)))
    wait_for(lambda: asked.answer is not None)
    assert asked.answer is not None
    engine.agent.release(asked)
    assert asked.answer.stored == (len(NAMES),)
    engine.announce(NAMES[: asked.answer.stored[0]])
    wait_for(lambda: set(engine.hear()) == set(NAMES))


def test_blocks_that_were_evicted_before_they_were_announced_are_not(engine: Engine) -> None:
    for rank in (0, 1):
        engine.put(rank)
    demote(engine)
    engine.evict("nvme")
    engine.announce()
    other = GROUP.chain(hashes_of(range(100, 132)))
    for rank in (0, 1):
        engine.put(rank, other)
    engine.announce(other)
    engine.until(in_medium("CPU", other))


def demote(engine: Engine) -> None:
    """Evict from memory until the blocks of the engine are in nvme only."""
    catalog = engine.served.daemon.planner.catalog  # type: ignore[union-attr]

    def demoted() -> bool:
        engine.evict("dram")
        return is_cold(engine, catalog)

    wait_for(demoted)


def is_cold(engine: Engine, catalog: Any) -> bool:
    """Return whether no block of the ranks is in memory."""

    def look() -> bool:
        rows = [
            row
            for namespace in catalog.namespaces.values()
            for name, row in namespace.rows.items()
            if name in NAMES
        ]
        return not any(column[row] for row in rows for column in catalog.num_resident[:-1])

    assert engine.served is not None
    return engine.served.call(look)
