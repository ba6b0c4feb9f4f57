"""Plug-ins that look up before they load, on a host with an empty disk: what another host stored is there."""

import hashlib
import shutil
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client
from kvtier.clients.connector import chain_store
from kvtier.clients.connector.chain_store import ChainStore
from kvtier.clients.connector.guard import Guard
from kvtier.clients.connector.opaque import opaque_identity
from kvtier.clients.lmcache.chunks import ChunkKind, ChunkStore

from ...daemon import PATIENT, Daemon
from ...e2e.test_shared_store import bundles, host
from ...waiting import until

PAGE_BYTES, PAGE_TOKENS = 64 << 10, 64
IDENTITY = opaque_identity(b"w" * 32, PAGE_BYTES, PAGE_TOKENS, "test", {}, "")
BUNDLE_PAGES = 4
NUM_BUNDLES = 3
STORED = NUM_BUNDLES * BUNDLE_PAGES
NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(STORED + 1)]
CHUNK_NAMES = [hashlib.sha256(name).digest() for name in NAMES]
PAGES = list(np.random.default_rng(0).integers(0, 256, (STORED + 1, PAGE_BYTES), np.uint8))
KIND = ChunkKind("a model", PAGE_BYTES, 256, "opaque")  # a bundle each


def chains(daemon: Daemon) -> ChainStore:
    return ChainStore(Client(daemon.target, timeout=PATIENT), Guard("test"), PATIENT.call_s)


def load(store: ChainStore, first: int, before: list[bytes]) -> int:
    """Load from page `first` on; return how many came, each byte as it was stored."""
    into = [np.zeros(PAGE_BYTES, np.uint8) for _ in PAGES[first:]]
    number = store.load(IDENTITY, NAMES[first:], into, before=before)
    for got, page in zip(into[:number], PAGES[first:], strict=False):
        np.testing.assert_array_equal(got, page)
    return number


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return a store with what a host put that is gone with its disk."""
    store = tmp_path / "store"
    store.mkdir()
    address = f"file://{store}"
    with host(tmp_path / "first", address, "eager") as first:
        writer = chains(first)
        assert writer.store(IDENTITY, NAMES, PAGES).num_blocks == len(NAMES)
        writer.close()
        chunks = ChunkStore(Client(first.target, timeout=PATIENT))
        assert all(chunks.write(KIND, CHUNK_NAMES[:STORED], PAGES[:STORED]))
        chunks.close()
        until(lambda: len(bundles(store)) == NUM_BUNDLES + STORED)
        first.stop(SIGKILL)
    shutil.rmtree(tmp_path / "first" / "nvme")
    return address


def test_a_lookup_counts_what_a_load_then_brings(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_store, "MAX_LOAD_BYTES", 5 * PAGE_BYTES)  # in pieces of a bundle
    with host(tmp_path / "second", url, "off") as second:
        store = chains(second)
        until(lambda: store.num_available(IDENTITY, NAMES) == STORED)
        assert store.num_stored(IDENTITY, NAMES) == 0, "nothing of it is here"
        assert load(store, 0, []) == STORED
        assert store.num_stored(IDENTITY, NAMES) == STORED
        store.close()


def test_a_batch_in_the_middle_of_a_chain(tmp_path: Path, url: str) -> None:
    """Of what the runtime has itself, only the names travel; it is fetched with the rest of its bundle."""
    first = BUNDLE_PAGES + 1
    with host(tmp_path / "second", url, "off") as second:
        store = chains(second)
        until(lambda: store.num_available(IDENTITY, NAMES[first:], NAMES[:first]) == STORED - first)
        assert load(store, first, NAMES[:first]) == STORED - first
        assert store.num_available(IDENTITY, NAMES[first:], NAMES[:first]) == STORED - first
        store.close()


def test_what_comes_before_need_not_be_stored(tmp_path: Path) -> None:
    """A batch that was stored as a chain of its own is found and loaded, whatever it continues."""
    store_folder = tmp_path / "store"
    store_folder.mkdir()
    with host(tmp_path / "only", f"file://{store_folder}", "off") as only:
        store = chains(only)
        first = BUNDLE_PAGES
        assert store.store(IDENTITY, NAMES[first:], PAGES[first:]).num_blocks == len(NAMES) - first
        assert store.num_available(IDENTITY, NAMES[first:], NAMES[:first]) == len(NAMES) - first
        assert load(store, first, NAMES[:first]) == len(NAMES) - first
        store.close()


def test_chunks_of_another_host(tmp_path: Path, url: str) -> None:
    with host(tmp_path / "second", url, "off") as second:
        store = ChunkStore(Client(second.target, timeout=PATIENT))
        until(lambda: store.available(KIND, CHUNK_NAMES) == STORED)
        assert store.which(KIND, CHUNK_NAMES, 2) == [True] * STORED + [False]
        into: list[Any] = [np.zeros(PAGE_BYTES, np.uint8) for _ in NAMES]
        assert store.read(KIND, CHUNK_NAMES, into) == STORED
        for got, page in zip(into[:STORED], PAGES, strict=False):
            np.testing.assert_array_equal(got, page)
        store.close()
