"""Names, kinds and options of LMCache's chunks, against an appliance in this process. Needs no lmcache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, InvalidRequest, Lookup
from kvtier.clients.lmcache.chunks import ChunkKind, ChunkStore, chunk_name
from kvtier.clients.lmcache.options import ChunkOptions
from kvtier.testing import FakeAppliance
from kvtier.v1.types import STANDARD_TIERS

CHUNK_BYTES = 24 << 10
KIND = ChunkKind("a model", CHUNK_BYTES, 16, "[2, 4, 16, 32] bfloat16")


def chunks(number: int, seed: int = 0) -> list[Any]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, CHUNK_BYTES), np.uint8))


def names(number: int, prompt: str = "prompt") -> list[bytes]:
    return [chunk_name(f"{prompt}@{chunk}") for chunk in range(number)]


@pytest.fixture
def store() -> ChunkStore:
    return ChunkStore(FakeAppliance().client())


def test_what_was_written_is_read(store: ChunkStore) -> None:
    written = chunks(5)
    assert store.stored(KIND, names(5)) == 0
    assert store.write(KIND, names(5), written) == [True] * 5
    assert store.write(KIND, names(5), written) == [True] * 5, "stored before is stored"
    back = [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(6)]
    assert store.read(KIND, names(6), back) == 5
    for one, other in zip(back, written, strict=False):
        np.testing.assert_array_equal(one, other)
    store.promote(KIND, names(6))
    store.promote(KIND, [])


@pytest.mark.parametrize(("tiers", "num_calls"), [((1, 1), 0), ((0, 1), 0), ((1, 2), 1), ((), 0)])
def test_only_what_is_not_in_memory_is_promoted(
    tiers: tuple[int, ...], num_calls: int, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted: list[int] = []
    found = Lookup(len(tiers), tuple(STANDARD_TIERS[tier] for tier in tiers), 0.0)
    monkeypatch.setattr(Client, "lookup", lambda *_: found)
    monkeypatch.setattr(Client, "prefetch", lambda _, namespace, names: promoted.append(len(names)))
    store.promote(KIND, names(2))
    assert promoted == [2] * num_calls


def test_a_chain_may_begin_in_the_middle_of_a_prompt(store: ChunkStore) -> None:
    assert store.write(KIND, names(6)[3:], chunks(3)) == [True] * 3
    assert store.stored(KIND, names(6)) == 0
    assert store.write(KIND, names(3), chunks(3)) == [True] * 3
    assert store.stored(KIND, names(6)) == 6


def test_gaps_are_seen_up_to_a_limit(store: ChunkStore) -> None:
    for chunk in (0, 1, 3, 6):
        store.write(KIND, [names(8)[chunk]], chunks(1))
    assert store.which(KIND, names(8), 8) == [True, True, False, True, False, False, True, False]
    assert store.which(KIND, names(8), 3) == store.which(KIND, names(8), 8)
    assert store.which(KIND, names(8), 2) == [True, True, False, True] + [False] * 4
    assert store.which(KIND, [], 2) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(KIND, model="another"),
        replace(KIND, layout="[2, 4, 16, 32] float16"),
        replace(KIND, weights_digest=b"w" * 32),
        replace(KIND, chunk_bytes=CHUNK_BYTES // 2),
    ],
)
def test_kinds_never_meet(other: ChunkKind, store: ChunkStore) -> None:
    store.write(KIND, names(2), chunks(2))
    assert other.identity() != KIND.identity()
    assert store.stored(other, names(2)) == 0


def test_a_kind_covers_exactly_its_bytes() -> None:
    for num_bytes in (1, 4096, 28672, 2 << 20, 32 << 20):
        assert replace(KIND, chunk_bytes=num_bytes).identity().geometry.block_bytes == num_bytes


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TARGET", "unix:///run/elsewhere.sock")
    assert ChunkOptions.of({}).target == "unix:///run/elsewhere.sock"
    assert ChunkOptions.of({"target": "host:1", "domain": "d"}) == ChunkOptions("host:1", "d")
    with pytest.raises(
        InvalidRequest, match="unknown setting 'tarjet' of kvtier's LMCache plug-in; it knows target, "
    ):
        ChunkOptions.of({"tarjet": "host:1"})
    with pytest.raises(InvalidRequest, match="domain of kvtier's LMCache plug-in must be str, is 7"):
        ChunkOptions.of({"domain": 7})


def test_weights_are_found_by_name_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert ChunkOptions("t").weights_digest("nobody/knows") == b""
    with pytest.raises(InvalidRequest, match="neither a local path nor in the cache"):
        ChunkOptions("t", weights="nobody/knows").weights_digest("a model")
