"""Block events for routers: the bytes of vLLM's own classes, and what a subscriber gets from a daemon."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.appliance.observability import kv_events
from kvtier.appliance.observability.kv_events import (
    END,
    chains,
    encode,
    removed,
    replay_endpoint_of,
    short,
    stored,
)
from kvtier.clients import Client

from ...generated import ROOT
from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Shown, Start, names, use

HBM = {"backend": "host", "capacity": "2MiB"}
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
HASHES = [bytes([i]) * 32 for i in (1, 2)]
EVENTS = [
    stored(HASHES, None, 16, "CPU"),
    stored(HASHES[1:], HASHES[0], 16, "STORAGE"),
    removed(HASHES, "STORAGE"),
]
#: md5 of what vLLM 0.32's KVEventBatch encodes of the same; the test against vLLM compares the bytes.
GOLDEN = "846b64ea0af5e096d1f313fb2f784933"
#: vLLM's own module, loaded without the rest of vLLM, which takes twenty seconds to import.
AS_VLLM = """
import importlib.util, pathlib, sys, types
import msgspec

root = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
network = ["get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"]
for name, words in {"config.kv_events": ["KVEventsConfig"], "v1.core.kv_cache_utils": [],
                    "utils.network_utils": network, "logger": []}.items():
    stub = sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    for word in words:
        setattr(stub, word, object)
sys.modules["vllm.logger"].init_logger = lambda name: None
sys.modules["vllm.v1.core.kv_cache_utils"].ExternalBlockHash = bytes | int
spec = importlib.util.spec_from_file_location("kv_events", root / "distributed" / "kv_events.py")
vllm = sys.modules["kv_events"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vllm)

hashes = [int.from_bytes(bytes([i]) * 8, "big") for i in (1, 2)]
def stored(names, parent, medium):
    return vllm.BlockStored(block_hashes=names, parent_block_hash=parent, token_ids=[], block_size=16,
                            lora_id=None, medium=medium, lora_name=None)
events = [stored(hashes, None, "CPU"), stored(hashes[1:], hashes[0], "STORAGE"),
          vllm.BlockRemoved(block_hashes=hashes, medium="STORAGE")]
batch = vllm.KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)
assert msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=vllm.KVEventBatch) == batch
print(msgspec.msgpack.encode(batch).hex())
"""


def test_the_bytes_are_golden() -> None:
    assert hashlib.md5(encode(1.5, EVENTS), usedforsecurity=False).hexdigest() == GOLDEN


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not there: make test-vllm makes it")
def test_vllm_encodes_the_same_and_reads_ours() -> None:
    ours = encode(1.5, EVENTS).hex()
    command = [str(VLLM), "-c", AS_VLLM, ours]
    theirs = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert theirs.split()[-1] == ours


def test_rows_are_cut_into_chains() -> None:
    parents = {2: 1, 3: 2, 5: 4, 9: NO_ROW}
    assert list(chains([2, 3, 9, 5], parents.__getitem__)) == [[2, 3], [9], [5]]
    assert list(chains([], parents.__getitem__)) == []


@pytest.mark.parametrize(
    ("endpoint", "replays"),
    [
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::]:5557", "tcp://[::]:5558"),
        ("ipc:///run/kvtier/events", "ipc:///run/kvtier/events.replay"),
        ("tcp://router:5557", ""),
        ("tcp://*:*", ""),
    ],
)
def test_replays_are_served_beside_what_is_bound(endpoint: str, replays: str) -> None:
    assert replay_endpoint_of(endpoint) == replays


class Router:
    """What a router does: it subscribes, applies events in the order of their numbers, and asks for a replay
    of what it has missed."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/pub"
        self._context = zmq.Context()
        self._listener = self._context.socket(zmq.SUB)
        self._listener.connect(self.endpoint)
        self._listener.setsockopt(zmq.SUBSCRIBE, b"")
        self.newest = -1  # number of the last batch applied
        self.held: set[tuple[str, int]] = set()
        self.events: list[dict[str, Any]] = []
        self.num_replays = 0

    def follow(self, timeout_ms: int = 50) -> None:
        """Apply what arrives until nothing does for a moment."""
        while self._listener.poll(timeout_ms):
            topic, number, payload = self._listener.recv_multipart()
            assert topic == b""
            if int.from_bytes(number, "big") > self.newest + 1:
                for missed in self.replay(self.newest + 1):
                    self._apply(*missed)
            self._apply(int.from_bytes(number, "big"), payload)

    def connect(self) -> Any:
        """Return a socket for replays."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(f"{self.endpoint}.replay")
        return socket

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches that the daemon answers with."""
        self.num_replays += 1
        socket = self.connect()
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        try:
            while True:
                empty, topic, number, payload = socket.recv_multipart()
                assert (empty, topic) == (b"", b"")
                if number == END:
                    assert payload == b""
                    return batches
                batches.append((int.from_bytes(number, "big"), payload))
        finally:
            socket.close(0)

    def _apply(self, number: int, payload: bytes) -> None:
        if number <= self.newest:
            return
        self.newest = number
        at, events, rank = msgpack.unpackb(payload)
        assert at > 1e9
        assert rank == 0
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            names = {(event["medium"], name) for name in event["block_hashes"]}
            if event["type"] == "BlockStored":
                assert event["block_size"] == GEOMETRY.block_tokens
                self.held |= names
            else:
                assert names <= self.held, "removed without having been stored"
                self.held -= names

    def close(self) -> None:
        self._context.destroy(0)


def held_by(shown: Shown) -> set[tuple[str, int]]:
    """Return the medium and the name of each block that can be read, as the catalog has it."""
    catalog = shown.daemon.planner.catalog
    mediums = [kv_events.MEDIUM[spec.kind] for spec in catalog.ladder.specs]
    return {
        (mediums[tier], short(name))
        for namespace in catalog.namespaces.values()
        for name, row in namespace.rows.items()
        for tier in catalog.ladder.tiers
        if catalog.num_resident[tier][row] == namespace.num_groups
    }


@pytest.fixture
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    router = Router(tmp_path_factory.mktemp("router"))
    yield router
    router.close()


def until_equal(router: Router, shown: Shown) -> None:
    """Follow until the router knows what the daemon holds."""

    def agree() -> bool:
        router.follow()
        return router.held == shown.served.call(lambda: held_by(shown)) and bool(router.held)

    shown.until(agree)


def until_greeted(router: Router, shown: Shown) -> None:
    """Follow until the router hears all that happens from now on."""

    def is_greeted() -> bool:
        router.follow()
        return router.newest > 0

    shown.until(is_greeted)


def test_a_router_follows_the_tiers_of_a_daemon(start: Start, router: Router) -> None:
    shown = start(kv_events=router.endpoint)
    until_greeted(router, shown)
    use(shown)
    until_equal(router, shown)
    assert {medium for medium, _ in router.held} == {"CPU", "STORAGE"}
    first = next(event for event in router.events if event["type"] == "BlockStored")
    assert first["parent_block_hash"] is None
    assert first["block_hashes"] == [short(name) for name in names("0")[: len(first["block_hashes"])]]


def test_what_was_there_before_is_told_to_those_that_come_late(start: Start, router: Router) -> None:
    shown = start(kv_events=router.endpoint)
    until_greeted(router, shown)
    use(shown)
    until_equal(router, shown)
    before = router.held
    shown = start(again=True, kv_events=router.endpoint)
    until_equal(router, shown)
    assert {medium for medium, _ in router.held} == {"STORAGE"}
    assert router.held <= before


def test_a_router_that_has_missed_more_than_is_remembered_gets_a_snapshot(
    start: Start, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_BATCHES", 3)
    monkeypatch.setattr(kv_events, "SLICE_ROWS", 8)
    shown = start(kv_events=router.endpoint)
    until_greeted(router, shown)
    was_at, num_replays = router.newest, router.num_replays + 1
    use(shown)
    batches = router.replay(was_at + 1)
    assert msgpack.unpackb(batches[0][1])[1] == [{"type": "AllBlocksCleared"}]
    numbers = [number for number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(batches)))
    assert numbers[0] > was_at
    until_equal(router, shown)
    assert router.num_replays == num_replays, "a listener that missed nothing asks for nothing"


def test_memory_is_one_medium(start: Start, router: Router) -> None:
    """A block that moves from dram to further memory stays where routers have it, and is told once."""
    further = {"cxl": {"kind": "memory", "capacity": "16MiB"}}
    shown = start(nvme=False, kv_events=router.endpoint, further=further)
    until_greeted(router, shown)
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        for chain in "012":
            client.put(namespace, names(chain), bytes(CHAIN_BLOCKS * GEOMETRY.block_bytes))
    until_equal(router, shown)
    catalog = shown.daemon.planner.catalog
    assert any(catalog.num_resident[tier][row] for tier in catalog.ladder.tiers[2:] for row in range(72))
    assert {event["type"] for event in router.events} == {"AllBlocksCleared", "BlockStored"}
    told = [name for event in router.events for name in event.get("block_hashes", [])]
    assert sorted(told) == sorted(short(name) for chain in "012" for name in names(chain))


def test_replays_are_limited(start: Start, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that cannot read a batch asks again after each: that must not multiply the traffic."""
    shown = start(nvme=False, kv_events=router.endpoint)
    until_greeted(router, shown)
    monkeypatch.setattr(kv_events, "REPLAY_BYTES_PER_S", 0.01)
    router.replay(router.newest)
    again = router.connect()
    again.send_multipart([b"", router.newest.to_bytes(8, "big")])
    assert not again.poll(500), "the second one waits for its share of the bytes per second"
    again.close(0)


def test_hbm_and_dram_are_one_medium(start: Start, router: Router) -> None:
    """What routers call GPU are the engine's own pages: a copy in hbm is told as CPU, once."""
    shown = start(nvme=False, kv_events=router.endpoint, further={"hbm": HBM})
    until_greeted(router, shown)
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, names("0"), bytes(CHAIN_BLOCKS * GEOMETRY.block_bytes))
        client.prefetch(namespace, names("0"), "hbm")
        catalog = shown.daemon.planner.catalog
        shown.until(lambda: shown.served.call(lambda: any(catalog.num_resident[0])))
    until_equal(router, shown)
    assert {medium for medium, _ in router.held} == {"CPU"}
    told = [name for event in router.events for name in event.get("block_hashes", [])]
    assert sorted(told) == sorted(short(name) for name in names("0"))


def test_a_request_that_is_none_stops_no_replays(start: Start, router: Router) -> None:
    shown = start(nvme=False, kv_events=router.endpoint)
    socket = router.connect()
    for frames in ([b""], [b"", b"1"], [b"", b"12345678", b"and more"]):
        socket.send_multipart(frames)
    socket.close(linger=1000)
    use(shown)
    until_equal(router, shown)


def test_events_are_of_no_cost_when_nobody_wants_them(start: Start) -> None:
    shown = start(nvme=False)
    assert shown.daemon.observability.kv_events is None
    assert json.dumps([o.__qualname__ for o in shown.daemon.appliance.observers]) == '["Telemetry.stepped"]'
