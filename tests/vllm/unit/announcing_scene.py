"""The agent of an engine with two ranks at a real daemon, and what its listeners are told."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.clients import AsyncClient, Client, PutOutcome
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.scheduler.agent import Agent
from kvtier.clients.vllm.scheduler.announcer import Announced, Announcer, Block, EventFields, Key
from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.channels import open_channel

from ...appliance.conftest import small_settings
from ...appliance.loops import DaemonThread
from ...waiting import until
from .engine import HASH_TOKENS, hashes_of
from .threads_scene import identities

WAIT_S = 120.0
GROUP = Group(0, 8, 8 // HASH_TOKENS)
TOKENS = range(32)
HASHES = hashes_of(TOKENS)
NAMES = GROUP.chain(HASHES)


class Engine:
    """The agent of an engine with two ranks, its listener, and the clients of its workers."""

    def __init__(self, folder: Path, served: DaemonThread | None = None, **sections: Any) -> None:
        """`served`: the daemon; one is started where it is None, with these `sections` of its settings."""
        self.folder = folder
        self.target = f"unix://{folder}/k.sock"
        self.sections = sections
        self.served = served
        if served is None:
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
        self.served = DaemonThread(small_settings(self.folder, nvme=True, write="idle", **self.sections))
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

    def announce(self, names: list[bytes] = NAMES, tokens: Sequence[int] = TOKENS) -> None:
        keys = [Key(("", b""), 0, name) for name in names]
        parents = [b"", *names]
        self.agent.announce(
            [
                Block(key, parents[i], EventFields(array("I", tokens[i * 8 : i * 8 + 8])))
                for i, key in enumerate(keys)
            ]
        )

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
        self.publish(changes)
        for block, medium in changes.stored:
            self.held[block.key.name] = medium
        for block, medium in [*changes.dropped, *changes.removed]:
            if self.held.get(block.key.name) == medium:
                del self.held[block.key.name]
        return self.held

    def publish(self, changes: Announced) -> None:
        """Tell further listeners; none here."""

    def until(self, wanted: dict[bytes, str]) -> None:
        until(lambda: self.hear() == wanted)

    def close(self) -> None:
        self.agent.close()
        self.stop_daemon()


def in_medium(medium: str, names: list[bytes] = NAMES) -> dict[bytes, str]:
    return dict.fromkeys(names, medium)


def demote(engine: Engine) -> None:
    """Evict from memory until the blocks of the engine are in nvme only; once all are there, or one whose
    idle copy has not ended would be gone."""
    until(lambda: is_copied(engine))

    def demoted() -> bool:
        engine.evict("dram")
        return not any(in_memory for in_memory, _ in residence(engine))

    until(demoted)


def is_copied(engine: Engine) -> bool:
    """Return whether every block of the ranks is whole in nvme."""
    return all(is_whole for _, is_whole in residence(engine))


def residence(engine: Engine) -> list[tuple[bool, bool]]:
    """Return for each block of the ranks whether some of it is in memory, and all of it in nvme."""
    assert engine.served is not None
    catalog = engine.served.daemon.planner.catalog

    def look() -> list[tuple[bool, bool]]:
        *memory, nvme = catalog.num_resident
        return [
            (any(column[row] for column in memory), nvme[row] == namespace.num_groups)
            for namespace in catalog.namespaces.values()
            for name, row in namespace.rows.items()
            if name in NAMES
        ]

    return engine.served.call(look)
