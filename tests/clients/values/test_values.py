"""Value objects and helpers: names, namespaces, buffers, staging, errors."""

import ctypes
import hashlib
import random
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.errors import REASONS
from kvtier.clients import Geometry, InvalidRequest, NamespaceIdentity, Urgency, errors, prefix_hashes
from kvtier.clients.memory.buffers import blocks_of, source_span, target_span
from kvtier.clients.memory.staging import ALIGN_BYTES, StagingArea
from kvtier.clients.options import plugin_connect_s
from kvtier.tiers.ladder import with_memory
from kvtier.v1 import kvcache_pb2, types_pb2
from kvtier.v1.conversions import (
    FIRST_FURTHER,
    STANDARD_WIRE,
    URGENCIES,
    WireTiers,
    identity_from_wire,
    identity_to_wire,
    urgency_to_wire,
)
from kvtier.v1.types import STANDARD_TIERS, PutOutcome, Tier, TierKind

GEOMETRY = Geometry(
    num_layers=5, num_kv_heads=2, head_dim=8, block_tokens=4, dtype="float16", layers_per_group=2
)


def test_prefix_hashes_are_chained_over_full_blocks() -> None:
    names = prefix_hashes(GEOMETRY, range(11))
    assert len(names) == 2
    assert prefix_hashes(GEOMETRY, range(8)) == names
    assert prefix_hashes(GEOMETRY, range(4, 8), parent=names[0]) == names[1:]
    assert prefix_hashes(GEOMETRY, np.arange(8, dtype=np.int32)) == names
    expected = b"kvtier.prefix.1" + (4).to_bytes(4, "big") + b"\0"
    expected += b"".join(token.to_bytes(8, "little") for token in range(4)) + bytes(4)
    assert names[0] == hashlib.sha256(expected).digest(), "the encoding is a promise: hashes outlive versions"


def test_everything_the_kv_depends_on_changes_the_name() -> None:
    base = prefix_hashes(GEOMETRY, range(4))
    assert prefix_hashes(GEOMETRY, [0, 1, 2, 4]) != base
    assert prefix_hashes(GEOMETRY, range(4), parent=bytes(32)) != base
    assert prefix_hashes(GEOMETRY, range(4), extra_keys=[b""]) != base
    split, joined = [
        prefix_hashes(GEOMETRY, range(4), extra_keys=keys) for keys in (["a", "bc"], ["ab", "c"])
    ]
    assert split != joined
    with pytest.raises(InvalidRequest, match="parent"):
        prefix_hashes(GEOMETRY, range(4), parent=b"short")


def test_fragments_are_the_layers_of_their_group() -> None:
    for layers, per_group in ((1, 0), (5, 2), (32, 8), (33, 8)):
        geometry = Geometry(layers, 2, 64, 16, "bfloat16", layers_per_group=per_group)
        groups = [geometry.layers_of(group) for group in range(geometry.num_groups)]
        assert [layer for group in groups for layer in group] == list(range(layers))
        assert geometry.fragment_bytes == tuple(len(group) * geometry.layer_bytes for group in groups)
        assert sum(geometry.fragment_bytes) == geometry.block_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"dtype": "half"}, "unknown dtype"),
        ({"layers_per_group": 9}, "layers_per_group"),
    ],
)
def test_geometry_names_the_fix(change: dict[str, Any], message: str) -> None:
    fields = {"num_layers": 4, "num_kv_heads": 1, "head_dim": 8, "block_tokens": 4, "dtype": "int8"}
    with pytest.raises(InvalidRequest, match=message):
        Geometry(**{**fields, **change})
    with pytest.raises(InvalidRequest, match="model_digest"):
        NamespaceIdentity(b"short", GEOMETRY)


def test_the_wire_and_the_python_types_agree_by_name() -> None:
    """Whatever either side's numbers are; what was promised of the wire's is in tests/wire_promises.txt."""
    urgencies = {number: name.partition("_")[2] for name, number in types_pb2.Urgency.items() if number}
    assert {number: urgency.name for number, urgency in URGENCIES.items()} == urgencies
    assert set(URGENCIES.values()) == set(Urgency)
    tiers = {number: name.partition("_")[2].lower() for name, number in types_pb2.Tier.items() if number}
    assert {info.tier: info.name for info in STANDARD_WIRE.announcement()} == tiers
    kinds = {name.removeprefix("TIER_KIND_") for name, number in types_pb2.TierKind.items() if number}
    assert kinds == {kind.name for kind in TierKind}
    assert {outcome.name: outcome.value for outcome in PutOutcome} == {
        name.removeprefix("PUT_OUTCOME_"): number for name, number in kvcache_pb2.PutOutcome.items() if number
    }


def test_tiers_survive_the_wire() -> None:
    packed = STANDARD_WIRE.pack(bytes(STANDARD_TIERS))
    assert list(packed) == [STANDARD_WIRE.number(tier) for tier in STANDARD_TIERS]
    assert STANDARD_WIRE.unpack(packed) == STANDARD_TIERS
    assert [URGENCIES[urgency_to_wire(urgency)] for urgency in Urgency] == list(Urgency)


def test_a_client_learns_the_tiers_of_a_daemon() -> None:
    """Those that types.proto names keep their numbers, wherever they stand."""
    ladder = with_memory(["cxl", "far"])
    daemon = WireTiers(ladder.infos)
    client = WireTiers.announced(daemon.announcement())
    assert client.ladder == daemon.ladder
    assert [daemon.number(tier) for tier in ladder.tiers] == [1, 2, FIRST_FURTHER, FIRST_FURTHER + 1, 3]
    assert client.unpack(daemon.pack(bytes(ladder.tiers))) == ladder.tiers
    assert client.number("nvme") == client.number(Tier.NVME) == 3
    assert client.tier(client.number("far")) is ladder.named("far")
    assert client.tier(FIRST_FURTHER + 2) is None
    with pytest.raises(InvalidRequest, match="tier must be one of hbm, dram, nvme, is 'far'"):
        STANDARD_WIRE.number("far")
    with pytest.raises(InvalidRequest, match="is 1"):
        STANDARD_WIRE.number(1)  # type: ignore[arg-type]


def test_daemons_of_another_age_are_understood() -> None:
    assert WireTiers.announced([]) is STANDARD_WIRE
    newer = types_pb2.TierInfo(
        tier=types_pb2.Tier.ValueType(40), name="tape", kind=types_pb2.TierKind.ValueType(9)
    )
    known = WireTiers.announced([*STANDARD_WIRE.announcement(), newer])
    assert known.ladder[-1] == (Tier(3, "tape"), None)
    assert known.unpack(bytes([40, 1])) == (Tier(3, "tape"), Tier.HBM)


def test_an_identity_survives_the_wire() -> None:
    geometry = Geometry(4, 1, 8, 4, "int8", layout="opaque", layers_per_group=2, num_planes=1)
    identity = NamespaceIdentity(b"m" * 16, geometry, b"a" * 16, "tp=0/2", "", b"p" * 32)
    received = identity_from_wire(identity_to_wire(identity), "tenant:acme")
    assert received == replace(identity, domain="tenant:acme")
    assert received.digest != identity.digest


def test_every_reason_of_the_daemon_has_a_family() -> None:
    for reason, row in REASONS.items():
        code = row.code.value[0]
        detail = types_pb2.ErrorDetail(code=code, reason=reason, message="m", retry_after_ms=1500)
        problem = errors.from_detail(detail.SerializeToString())
        assert (problem.reason, problem.retry_after_s, problem.message) == (reason, 1.5, "m")
        assert (type(problem) is errors.ServerBug) == (reason == "BUG")


def test_import_needs_neither_torch_nor_server_code() -> None:
    script = (
        "import sys, kvtier, kvtier.clients, kvtier.testing; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'grpc', 'xxhash')"
        " or m.startswith(('kvtier.tiers', 'kvtier.appliance', 'kvtier.policies'))])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------- buffers


class Tensor:
    """What a bfloat16 tensor offers: a pointer, no buffer protocol."""

    class device:  # noqa: N801
        type = "cpu"

    def __init__(self, num_bytes: int, contiguous: bool = True, lazy: str = "") -> None:
        self.memory = ctypes.create_string_buffer(num_bytes)
        self._contiguous = contiguous
        self._lazy = lazy

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def is_contiguous(self) -> bool:
        return self._contiguous

    def is_neg(self) -> bool:
        return self._lazy == "negated"

    def is_conj(self) -> bool:
        return self._lazy == "conjugated"

    def numel(self) -> int:
        return len(self.memory) // 2

    def element_size(self) -> int:
        return 2


def test_every_kind_of_memory_is_found() -> None:
    array = np.arange(24, dtype=np.float32)
    kinds: list[Any] = [array, array.tobytes(), bytearray(96), memoryview(bytearray(96)), Tensor(96)]
    for buffer in kinds:
        span = source_span(buffer)
        assert span.num_bytes == 96
        if not isinstance(buffer, Tensor):
            assert ctypes.string_at(span.address, 96) == memoryview(buffer).cast("B").tobytes()
    assert target_span(array).address == source_span(array).address == array.ctypes.data
    assert target_span(np.empty(0)).num_bytes == 0


def test_unusable_memory_is_refused_with_the_fix() -> None:
    for buffer, message in (
        (np.zeros((4, 4))[:, 1], "contiguous"),
        (bytes(8), "read-only"),
        (object(), "no buffer"),
        (Tensor(8, contiguous=False), "contiguous"),
        (Tensor(8, lazy="negated"), "resolve_neg"),
        (Tensor(8, lazy="conjugated"), "resolve_conj"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            target_span(buffer)
    on_gpu: Any = Tensor(8)
    on_gpu.device = type("device", (), {"type": "cuda", "__str__": lambda self: "cuda:0"})()
    with pytest.raises(InvalidRequest, match="host memory"):
        source_span(on_gpu)


def test_blocks_are_gathered_in_order() -> None:
    data = np.arange(64, dtype=np.uint8)
    for source in (data, [bytes(data[i : i + 16]) for i in range(0, 64, 16)]):
        target = np.zeros(64, np.uint8)
        blocks_of(source, 4, 16, writable=False).gather(target_span(target).address)
        np.testing.assert_array_equal(target, data)


@pytest.mark.parametrize(("call_s", "connect_s"), [(0.5, 0.5), (5.0, 1.0), (120.0, 24.0)])
def test_a_plugin_connects_within_a_second_unless_it_is_patient(call_s: float, connect_s: float) -> None:
    assert plugin_connect_s(call_s) == connect_s


def test_copies_release_the_gil() -> None:
    """A Python thread makes progress while copies run: nothing else in their loop lets it."""
    num_bytes, most_copies, enough = 32 << 20, 500, 6
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    blocks = blocks_of(source, 1, num_bytes, writable=False)
    started, ended, progress = threading.Event(), threading.Event(), 0

    def copy() -> None:
        started.set()
        num_copies = 0
        while progress < enough and num_copies < most_copies:
            blocks.gather(target_span(target).address)
            num_copies += 1
        ended.set()

    thread = threading.Thread(target=copy)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is made to give the GIL up
    try:
        thread.start()
        started.wait()
        while not ended.is_set():
            progress += 1
            ended.wait(0.001)
    finally:
        sys.setswitchinterval(switch)
        thread.join()
    assert progress >= enough


# --------------------------------------------------------------------------------------- staging


def test_staging_books_stay_right() -> None:
    chance = random.Random(4)
    area = StagingArea(np.zeros(64 * ALIGN_BYTES, np.uint8))
    taken: dict[int, int] = {}
    for _ in range(500):
        if taken and chance.random() < 0.5:
            offset = chance.choice(list(taken))
            area.give(offset)
            del taken[offset]
        else:
            num_bytes = chance.randrange(1, 12 * ALIGN_BYTES)
            offset_or_none = area.take(num_bytes)
            if offset_or_none is not None:
                for other, length in taken.items():
                    assert offset_or_none + num_bytes <= other or other + length <= offset_or_none
                taken[offset_or_none] = num_bytes
        assert area.check_integrity() == []
    for offset in taken:
        area.give(offset)
    assert area.take(area.capacity_bytes) == 0
    assert area.offset_of(area.address + 8, 8) == 8
    assert area.offset_of(area.address - 1, 8) is None
    assert area.offset_of(area.address, area.capacity_bytes + 1) is None
