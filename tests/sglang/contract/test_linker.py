"""KvtierLinker made by SGLang's own factory and driven by its own wrapper, with a real daemon behind.

What is compared is every byte of every page, layer by layer, in pools that SGLang's own views describe.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolGroup
from sglang.srt.mem_cache.unified_cache import unified_cache_linker as upstream
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

from kvtier.clients import InvalidRequest
from kvtier.clients.errors import DeadlineExceeded
from kvtier.clients.sglang import KvtierLinker
from kvtier.clients.sglang import linker as linker_module
from kvtier.clients.sglang.delivery import Staging
from kvtier.clients.sglang.layered import LayeredPages

from ...daemon import Daemon
from ...waiting import until
from .linking import LAYERS, PAGE, Key, Match, Tree, fill, hashes_of, page_of, pool_group, slots

Make = Callable[..., KvtierLinker]
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {},
    "pages of several fragments": {"head_dim": 4_000},
    "windows": {"has_window": True},
    "states": {"has_state": True},
    "both": {"has_window": True, "has_state": True},
}


@pytest.fixture
def make(
    shared_daemon: Daemon, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Make linkers as SGLang's worker does; those of one test have the same weights."""
    made: list[KvtierLinker] = []
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()
    monkeypatch.setattr(linker_module, "resolve_hybrid_device_pool_group", lambda *, kvcache, **_: kvcache)
    monkeypatch.setattr(linker_module, "get_model", lambda: SimpleNamespace(model_path="served"))
    monkeypatch.setattr(linker_module, "get_parallel", lambda: SimpleNamespace(tp_size=1, attn_dcp_size=1))
    monkeypatch.setattr(upstream, "get_storage_hash_str", hashes_of)

    def make_linker(
        group: DevicePoolGroup, daemon: Daemon = shared_daemon, attn_cp_size: int = 1, **settings: Any
    ) -> KvtierLinker:
        patient = {f"{call}_timeout_s": 60.0 for call in ("lookup", "load", "store")}
        chosen = {"target": daemon.target, "weights_digest": digest, **patient, **settings}
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: group),
            req_to_token_pool=SimpleNamespace(register_layer_transfer_counter=lambda counter: None),
            page_size=PAGE,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=attn_cp_size,
        )
        config = {
            "linker": "KvtierLinker",
            "linker_module_path": "kvtier.clients.sglang",
            "linker_extra_config": chosen,
        }
        made.append(
            create_unified_cache_linker(None, params, backend="dynamic", config=config, components=set())
        )
        return made[-1]

    yield make_linker
    for linker in made:
        linker.close()


def prompt(name: str, num_pages: int) -> Key:
    return Key(f"{name} {n}" for n in range(num_pages * PAGE))


def wait_for_leases(daemon: Daemon, expected: int) -> None:
    """Wait until the daemon holds so many: what ends a lease has no answer."""
    until(lambda: daemon.status().num_leases == expected, f"not {expected} leases")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_one_engine_offloads_another_loads(make: Make, shape: dict[str, Any]) -> None:
    here, there = pool_group(**shape), pool_group(**shape)
    fill(here, 1)
    first, second = Tree(make(here), here), Tree(make(there), there)
    key = prompt("a", 5)
    first.store(key, 3, 4, 5, 9, 7)
    assert first.stored == {0: True}
    assert not first.locked
    assert second.run(prompt("b", 5)) == (0, [])
    assert second.run(key) == (5 * PAGE, [])
    for name, pages in second.taken.items():
        for page, source in zip(reversed(pages), (7, 9, 5, 4, 3), strict=False):
            for got, expected in zip(page_of(there, name, page), page_of(here, name, source), strict=True):
                assert torch.equal(got, expected), name
    assert second.run(Key([*key, *prompt("more", 2)]))[0] == 5 * PAGE
    branch = Key([*key[: 3 * PAGE], *prompt("other", 2)])
    has_windows = len(second.components) > 1  # these end where a node does
    assert second.run(branch)[0] == (0 if has_windows else 3 * PAGE)


def test_a_node_continues_what_was_looked_up_before_it(make: Make, shared_daemon: Daemon) -> None:
    """The tree offloads pieces of a chain; the appliance links each to what it continues."""
    group = pool_group()
    linker = make(group)
    tree = Tree(linker, group)
    key = prompt("a", 4)
    tree.run(key)
    parents: list[bytes] = []
    put = linker._sets._client.put

    def watched(*arguments: Any, **named: Any) -> Any:
        parents.append(named["parent"])
        return put(*arguments, **named)

    linker._sets._client.put = watched  # type: ignore[method-assign]
    tree.store(Key(key[: 2 * PAGE]), 0, 1)
    hashes = hashes_of(key)
    tail = PoolTransfer(PoolName.KV, None, slots(PAGE, 2, 3), hashes[2:], PoolHitPolicy.ALL_PAGES)
    assert linker.offload([tail])
    linker.reset()
    assert parents == [b"", bytes.fromhex(hashes[1])]


def test_layers_are_ready_one_after_another(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer is given to the forward before the last one is copied."""
    here, there = pool_group(head_dim=4_000), pool_group(head_dim=4_000)
    fill(here, 2)
    Tree(make(here), here).store(prompt("a", 3), 0, 1, 2)
    linker = make(there)
    tree = Tree(linker, there)
    held, pages = threading.Event(), linker._pages[PoolName.KV]
    write = pages.write

    def late(numbers: Any, data: Any, first: int, last: int) -> None:
        if last == pages.page_bytes:
            assert held.wait(60)
        write(numbers, data, first, last)

    monkeypatch.setattr(pages, "write", late)
    request = SimpleNamespace(rid="one", last_node=None, kv=None, swa_branching_seqlen=None)
    tree.wrapper.match(prompt("a", 3), request, Match())
    tree.wrapper.load_back(request)
    index = tree.wrapper.start_layer_wise_loading()
    counter = linker.layer_done_counter
    counter.set_consumer(index)
    counter.wait_until(0)
    assert not counter.futures[index][LAYERS - 1].done()
    held.set()
    assert tree.wrapper.finish_loads() == []


def test_a_load_under_way_does_not_hold_up_the_next_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the scheduler pinned over the connection whose leases the loader was waiting on."""
    group = pool_group()
    linker = make(group)
    tree = Tree(linker, group)
    key = prompt("a", 3)
    tree.store(key, 0, 1, 2)
    transfer = PoolTransfer(PoolName.KV, None, slots(PAGE, 4, 5, 6), hashes_of(key))
    assert linker.load("one", [transfer])
    (first,) = linker._queued["one"]
    lock = first.store._client._lock
    held, done = threading.Event(), threading.Event()

    def read() -> None:
        """Hold the connection, as the loader does while it waits for a fragment."""
        with lock:
            held.set()
            done.wait(20)

    reader = threading.Thread(target=read)
    pages = linker._pages[PoolName.KV]
    write = pages.write

    def late(*arguments: Any) -> None:
        assert done.wait(60)
        write(*arguments)

    monkeypatch.setattr(pages, "write", late)
    index = linker.start_layer_wise_loading()
    reader.start()
    assert held.wait(60)
    assert linker.load("two", [transfer])
    assert reader.is_alive(), "it waited until the reader let go"
    done.set()
    reader.join()
    assert linker.finish_layer_wise_loading(index)
    assert linker.cancel_queued_load("two")


def test_a_queued_load_that_is_given_up_holds_nothing(make: Make, shared_daemon: Daemon) -> None:
    group = pool_group()
    linker = make(group)
    tree = Tree(linker, group)
    key = prompt("a", 3)
    tree.store(key, 0, 1, 2)
    transfer = PoolTransfer(PoolName.KV, None, slots(PAGE, 4, 5, 6), hashes_of(key))
    assert linker.load("one", [transfer])
    wait_for_leases(shared_daemon, 1)
    assert linker.cancel_queued_load("one")
    wait_for_leases(shared_daemon, 0)
    assert not linker.cancel_queued_load("one")
    assert linker.start_layer_wise_loading() == -1
    assert tree.run(key) == (3 * PAGE, [])


def test_what_left_between_lookup_and_load_is_computed(make: Make) -> None:
    group = pool_group()
    linker = make(group)
    tree = Tree(linker, group)
    linker.lookup = lambda rid, transfers: [1, 2, 3]  # type: ignore[method-assign]
    assert tree.run(prompt("never stored", 3)) == (0, [])
    assert [len(one.freed) for one in tree.components.values()] == [1]
    assert linker.causes == {"NOT_PINNED": 1}


def test_a_prompt_needs_no_more_of_a_quota_than_its_bytes(make: Make, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    quota = f"tenants: {{acme: {{members: ['uid:{os.getuid()}'], quota: {{pinned: 8MiB}}}}}}\n"
    policy.write_text(f"tiers: {{dram: {{capacity: 64MiB}}}}\n{quota}")
    daemon = Daemon(tmp_path, policy)
    daemon.start()
    try:
        group = pool_group(head_dim=4_000)
        linker = make(group, daemon)
        tree = Tree(linker, group)
        key, page_bytes = prompt("a", 6), linker._pages[PoolName.KV].page_bytes
        assert 4 << 20 < 6 * page_bytes < 8 << 20 < 12 * page_bytes
        tree.store(key, 0, 1, 2, 3, 4, 5)
        assert tree.run(key) == (6 * PAGE, [])
        assert tree.run(key) == (6 * PAGE, [])
        tree.store(prompt("b", 12), *range(6, 12), *range(6))
        assert tree.run(prompt("b", 12)) == (0, []), "more than the quota is computed"
        assert linker.causes == {"NOT_PINNED": 1}
    finally:
        linker.close()
        daemon.close()


def test_late_stores_do_not_keep_a_load_from_being_asked(make: Make) -> None:
    group = pool_group()
    linker = make(group)
    key = prompt("a", 3)
    Tree(linker, group).store(key, 0, 1, 2)

    def late() -> None:
        raise DeadlineExceeded("a store", reason="DEADLINE_EXCEEDED")

    for _ in range(3):
        linker._sets.guard.ask("store", late)
    assert linker._sets.guard.breaker.is_open
    assert linker.load("one", [PoolTransfer(PoolName.KV, None, slots(PAGE, 4, 5, 6), hashes_of(key))])
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert linker.causes == {"DEADLINE_EXCEEDED": 3}


def test_a_daemon_that_is_gone_costs_hits_only(make: Make, daemon: Daemon) -> None:
    group = pool_group()
    fill(group, 3)
    tree = Tree(make(group, daemon, **dict.fromkeys(("lookup_timeout_s", "load_timeout_s"), 1.0)), group)
    key = prompt("a", 4)
    tree.store(key, 0, 1, 2, 3)
    assert tree.run(key) == (4 * PAGE, [])
    daemon.stop()
    assert tree.run(key) == (0, [])
    tree._next_page = 20
    tree.store(prompt("b", 2), 4, 5)
    assert tree.stored == {0: True, 1: False}


def test_reset_forgets_unless_told_to_keep(make: Make) -> None:
    for mode, expected in (("keep", 3 * PAGE), ("forget", 0)):
        group = pool_group()
        linker = make(group, on_reset=mode)
        tree = Tree(linker, group)
        tree.store(prompt("a", 3), 0, 1, 2)
        tree.wrapper.reset()
        assert tree.run(prompt("a", 3)) == (expected, [])


def test_other_pools_share_nothing(make: Make) -> None:
    here, wider = pool_group(), pool_group(head_dim=32)
    Tree(make(here), here).store(prompt("a", 3), 0, 1, 2)
    assert Tree(make(wider), wider).run(prompt("a", 3)) == (0, [])
    assert Tree(make(here, variant="other"), here).run(prompt("a", 3)) == (0, [])


def test_a_load_that_has_begun_and_fails_is_reported_and_nothing_stays_pinned(
    make: Make, shared_daemon: Daemon
) -> None:
    """SGLang aborts the batch's requests; the next ones find the pages."""
    group = pool_group()
    linker = make(group)
    tree = Tree(linker, group)
    key = prompt("a", 3)
    tree.store(key, 0, 1, 2)
    pages: Any = linker._pages[PoolName.KV]
    write = pages.write

    def full(*_: Any) -> None:
        wait_for_leases(shared_daemon, 1)
        raise RuntimeError("CUDA out of memory")

    pages.write = full
    assert tree.run(key, "lost") == (3 * PAGE, ["lost"])
    wait_for_leases(shared_daemon, 0)
    assert linker.causes == {"LOAD_FAILED": 1, "PLUGIN_BUG": 1}
    pages.write = write
    assert tree.run(key) == (3 * PAGE, [])
    wait_for_leases(shared_daemon, 0)


def test_one_of_several_ranks_begins_what_it_cannot_pin(make: Make) -> None:
    """They all have to say the same."""
    group = pool_group()
    linker = make(group)
    linker._config.tp_size = 2
    tree = Tree(linker, group)
    linker.lookup = lambda rid, transfers: [1, 2, 3]  # type: ignore[method-assign]
    assert tree.run(prompt("never stored", 3), "lost") == (3 * PAGE, ["lost"])
    assert linker.causes == {"NOT_PINNED": 1, "LOAD_FAILED": 1}


def test_a_failure_midway_waits_for_what_was_queued_before_it() -> None:
    """Afterwards SGLang gives the pages to another request."""
    (entry,) = pool_group().entries
    pages: Any = LayeredPages(entry)
    events: list[str] = []
    staging = Staging(pages.device, pages.page_bytes)
    staging._stream = SimpleNamespace(synchronize=lambda: events.append("all has run"))

    def full(*_: Any) -> None:
        events.append("failed")
        raise RuntimeError("CUDA out of memory")

    pages.read = pages.write = full
    fragment: Any = SimpleNamespace(copy=lambda into: into)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        staging.write(pages, torch.tensor([0]), {0: fragment}, 0, pages.page_bytes)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        staging.read(pages, torch.tensor([0]))
    assert events == ["failed", "all has run"] * 2


def test_wrong_settings_are_refused_when_it_is_made(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="unknown setting 'stagingbytes' of the kvtier linker"):
        make(pool_group(), stagingbytes=1)
    with pytest.raises(InvalidRequest, match="on_reset must be one of forget, keep"):
        make(pool_group(), on_reset="maybe")


def test_contexts_cut_over_ranks_are_refused_when_it_is_made(make: Make) -> None:
    """SGLang wants the same word from all of them, and a page is not one rank's."""
    with pytest.raises(InvalidRequest, match=r"cut over ranks \(CP\); use HiCache's storage backend"):
        make(pool_group(), attn_cp_size=2)
