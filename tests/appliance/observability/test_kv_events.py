"""Block events for routers: the bytes of vLLM's own classes, and what a subscriber gets from a daemon."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvtier.appliance.observability.kv_events import (
    END,
    chains,
    encode,
    removed,
    replay_endpoint_of,
    stored,
)
from kvtier.clients import Client

from ...generated import ROOT
from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Start, names

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
HASHES = [bytes([i]) * 32 for i in (1, 2)]
EVENTS = [
    stored(HASHES, None, 16, "CPU"),
    stored(HASHES[1:], HASHES[0], 16, "GPU"),
    removed(HASHES, "STORAGE"),
]
#: md5 of what vLLM 0.32's KVEventBatch encodes of the same; the test against vLLM compares the bytes.
GOLDEN = "db677e53d90a15b5d89eb7acbd994fb4"
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

hashes = [bytes([i]) * 32 for i in (1, 2)]
def stored(names, parent, medium):
    return vllm.BlockStored(block_hashes=names, parent_block_hash=parent, token_ids=[], block_size=16,
                            lora_id=None, medium=medium, lora_name=None)
events = [stored(hashes, None, "CPU"), stored(hashes[1:], hashes[0], "GPU"),
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


def test_notices_are_cut_into_chains() -> None:
    parents = {b"b": b"a", b"c": b"b", b"e": b"d", b"x": None}
    found = list(chains([b"b", b"c", b"x", b"e"], parents.get))
    assert found == [(b"a", [b"b", b"c"]), (None, [b"x"]), (b"d", [b"e"])]
    assert list(chains([], parents.get)) == []


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


class Subscriber:
    """What a router does: subscribe, and ask for what it missed."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/pub", f"ipc://{folder}/pub.replay"
        self._context = zmq.Context()

    def listen(self) -> Any:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(self.endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket

    def replay(self, first: int) -> list[tuple[int, Any]]:
        socket = self._context.socket(zmq.REQ)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(self.replay_endpoint)
        socket.send(first.to_bytes(8, "big"))
        batches: list[tuple[int, Any]] = []
        try:
            while True:
                topic, number, payload = socket.recv_multipart()
                if number == END:
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))
                # REQ would want to send now; vLLM's clients use DEALER for many answers
                socket.close(0)
                return batches + self.replay(batches[-1][0] + 1)
        finally:
            socket.close(0)

    def close(self) -> None:
        self._context.destroy(0)


def test_a_router_follows_the_tiers_of_a_daemon(start: Start, tmp_path: Path) -> None:
    router = Subscriber(tmp_path)
    shown = start(nvme=False, kv_events=router.endpoint)
    payload = bytes(CHAIN_BLOCKS * GEOMETRY.block_bytes)
    try:
        with Client(shown.target) as client:
            namespace = client.register(IDENTITY)
            for chain in "012":
                client.put(namespace, names(chain), payload)
        batches = router.replay(0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        held: dict[tuple[str, bytes], int] = {}
        for _, (at, events, rank) in batches:
            assert at > 1e9
            assert rank == 0
            for event in events:
                assert event["medium"] == "CPU"
                for name in event["block_hashes"]:
                    if event["type"] == "BlockStored":
                        assert event["block_size"] == GEOMETRY.block_tokens
                        held[event["medium"], name] = held.get((event["medium"], name), 0) + 1
                    else:
                        del held[event["medium"], name]
        catalog = shown.daemon.planner.catalog
        assert {name for _, name in held} == {
            name
            for ns in catalog.namespaces.values()
            for name, row in ns.rows.items()
            if catalog.tier_of(row) is not None
        }
        first = next(e for _, (_, events, _) in batches for e in events if e["type"] == "BlockStored")
        assert first["parent_block_hash"] is None
        assert first["block_hashes"] == names("0")[: len(first["block_hashes"])]
    finally:
        router.close()


def test_a_subscriber_gets_numbered_batches(start: Start, tmp_path: Path) -> None:
    router = Subscriber(tmp_path)
    shown = start(nvme=False, kv_events=router.endpoint)
    socket = router.listen()
    try:
        with Client(shown.target) as client:
            namespace = client.register(IDENTITY)
            publish = shown.daemon.observability.kv_events
            assert publish is not None
            name, arrived = 0, False
            while not arrived:  # a subscription takes a moment to reach a publisher
                block = hashlib.sha256(str(name).encode()).digest()
                client.put(namespace, [block], bytes(GEOMETRY.block_bytes))
                arrived, name = bool(socket.poll(500)), name + 1
            topic, number, payload = socket.recv_multipart()
            assert topic == b""
            [event] = msgpack.unpackb(payload)[1]
            assert event["block_hashes"] == [
                hashlib.sha256(str(int.from_bytes(number, "big")).encode()).digest()
            ]
    finally:
        socket.close(0)
        router.close()


def test_events_are_of_no_cost_when_nobody_wants_them(start: Start) -> None:
    shown = start(nvme=False)
    assert shown.daemon.observability.kv_events is None
    assert json.dumps([o.__qualname__ for o in shown.daemon.appliance.observers]) == '["Telemetry.stepped"]'
