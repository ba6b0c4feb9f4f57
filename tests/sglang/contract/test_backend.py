"""KvtierStorage built by SGLang's own factory, with a real daemon behind, beside SGLang's own file backend.

The file backend is the oracle: after the same stores, both must give the same answers to the same
questions.
"""

import hashlib
import inspect
import json
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvtier.clients.sglang import KvtierStorage
from kvtier.clients.sglang import backend as backend_module
from kvtier.clients.sglang.identity import run_of_server

from ...daemon import Daemon
from ...ports import free_port
from .pools import HostPool

Make = Callable[..., KvtierStorage]


def config_of(extra: dict[str, Any] | None = None, **changes: Any) -> HiCacheStorageConfig:
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "served",
        **changes,
    }
    return HiCacheStorageConfig(**fields, extra_config=extra)


def keys_of(prompt: str, number: int) -> list[str]:
    """Page hashes as SGLang chains them."""
    keys, parent = [], b""
    for page in range(number):
        parent = hashlib.sha256(parent + f"{prompt} {page}".encode()).digest()
        keys.append(parent.hex())
    return keys


@pytest.fixture
def make(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Make backends through the factory; those of one test have the same weights."""
    made: list[KvtierStorage] = []
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()

    def make_backend(
        pool: Any = None, settings: dict[str, Any] | None = None, **changes: Any
    ) -> KvtierStorage:
        chosen = {"target": shared_daemon.target, "weights_digest": digest, **(settings or {})}
        extra = {
            "backend_name": "kvtier",
            "module_path": "kvtier.clients.sglang",
            "class_name": "KvtierStorage",
            "interface_v1": 1,
            "kvtier": chosen,
        }
        extra = json.loads(json.dumps(extra))  # as it comes from the command line
        backend = StorageBackendFactory.create_backend("dynamic", config_of(extra, **changes), pool)
        assert isinstance(backend, KvtierStorage)
        made.append(backend)
        if pool is not None:
            backend.register_mem_pool_host(pool)
            backend.on_host_pools_registered()
        return backend

    yield make_backend
    for backend in made:
        backend.close()


@pytest.fixture
def file_backend(tmp_path: Path) -> HiCacheFile:
    return HiCacheFile(config_of({"file_storage_path": str(tmp_path / "pages")}))


def test_every_method_of_the_interface_is_ours_with_its_parameters() -> None:
    assert issubclass(KvtierStorage, HiCacheStorage)
    assert not inspect.isabstract(KvtierStorage)
    inherited = {"get_stats", "on_host_pools_registered"}  # nothing to add
    for name, theirs in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        if name.startswith("_") or name in inherited:
            continue
        ours = inspect.unwrap(getattr(KvtierStorage, name))
        assert ours is not theirs, name
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


@pytest.mark.parametrize("how", ["page_first", "layer_first", "flat pages"])
def test_pages_come_back_into_other_slots_of_another_process(make: Make, how: str) -> None:
    layout = "page_first" if how == "flat pages" else how
    pools = [HostPool(20, layout, has_addresses=how != "flat pages") for _ in range(2)]
    pools[0].fill(1)
    one, other = make(pools[0]), make(pools[1])
    keys = keys_of("a", 6)
    assert one.batch_exists(keys) == 0
    assert one.batch_set_v1(keys, pools[0].indices(3, 7, 1, 0, 9, 12)) == [True] * 6
    assert other.batch_exists(keys) == 6
    assert other.batch_exists([*keys, *keys_of("b", 2)]) == 6
    assert other.batch_get_v1(keys, pools[1].indices(5, 4, 11, 19, 2, 0)) == [True] * 6
    for source, target in zip((3, 7, 1, 0, 9, 12), (5, 4, 11, 19, 2, 0), strict=True):
        assert torch.equal(pools[0].page(source), pools[1].page(target))
    untouched = set(range(20)) - {5, 4, 11, 19, 2, 0}
    assert all(not pools[1].page(number).any() for number in untouched)
    assert one.guard.causes == other.guard.causes == {}


def test_a_hit_ends_at_the_first_page_that_is_missing(make: Make) -> None:
    pool, into = HostPool(10), HostPool(10)
    pool.fill(2)
    backend = make(pool)
    keys = keys_of("a", 6)
    backend.batch_set_v1(keys[:2], pool.indices(0, 1))
    info = HiCacheStorageExtraInfo(prefix_keys=keys[:3])
    assert backend.batch_set_v1(keys[3:5], pool.indices(3, 4), info) == [
        True,
        True,
    ]  # its parent is not there
    assert backend.batch_exists(keys) == 2
    assert backend.exists(keys[3])
    assert not backend.exists(keys[2])
    assert make(into).batch_get_v1(keys, into.indices(*range(6))) == [True, True, False, False, False, False]
    assert not into.page(3).any()
    assert backend.batch_set_v1(
        keys[2:3], pool.indices(2), HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    ) == [True]
    assert backend.batch_exists(keys) == 5


def test_the_generic_path_copies_tensors(make: Make, file_backend: HiCacheFile) -> None:
    pool = HostPool(10)
    pool.fill(3)
    keys, values = keys_of("a", 4), [pool.page(n) for n in range(4)]
    for backend in (make(pool), file_backend):
        assert backend.batch_set(keys[:3], values[:3]) is True
        assert backend.set(keys[0], values[0]) is True
        got = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        assert [one is None for one in got] == [False, False, False, True]
        assert all(
            torch.equal(one, value) for one, value in zip(got, values, strict=False) if one is not None
        )
        target = pool.get_dummy_flat_data_page()
        assert backend.get(keys[1], target) is target
        assert torch.equal(target, values[1])
        assert backend.get(keys[3], pool.get_dummy_flat_data_page()) is None
    fresh = make(pool).get(keys[2])
    assert torch.equal(fresh, values[2])


@pytest.mark.parametrize("seed", range(6))
def test_pools_of_hybrid_models_as_the_file_backend_has_them(
    make: Make, file_backend: HiCacheFile, seed: int
) -> None:
    """Random pages of three pools are stored; then every question has the answer of the file backend."""
    chance = random.Random(seed)
    keys = keys_of(f"hybrid {seed}", 10)
    pools = {
        name: HostPool(12, page_size=size)
        for name, size in ((PoolName.KV, 8), (PoolName.SWA, 4), (PoolName.MAMBA, 1))
    }
    ours = make(pools[PoolName.KV])
    for number, (name, pool) in enumerate(pools.items()):
        pool.fill(seed * 10 + number)
        for backend in (ours, file_backend):
            backend.register_mem_host_pool_v2(pool, name)
        chosen = sorted(chance.sample(range(10), chance.choice([10, 9, 7])))
        if name is PoolName.KV:
            chosen = list(range(chance.choice([4, 7, 10])))
        asked = [PoolTransfer(name, pool.indices(*chosen), keys=[keys[n] for n in chosen])]
        expected = {name: [True] * len(chosen)}
        assert file_backend.batch_set_v2(asked) == ours.batch_set_v2(asked) == expected
    for window in (1, 2, 3):
        transfers = [
            PoolTransfer(PoolName.SWA, keys=keys[-window:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(
                PoolName.MAMBA,
                hit_policy=chance.choice([PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES]),
            ),
        ]
        for asked_pools in ([], transfers[:1], transfers):
            assert ours.batch_exists_v2(keys, asked_pools) == file_backend.batch_exists_v2(keys, asked_pools)
    targets = {name: HostPool(12, page_size=pool.page_size) for name, pool in pools.items()}
    reader = make(targets[PoolName.KV])
    for name, target in targets.items():
        reader.register_mem_host_pool_v2(target, name)
        stored = [
            key
            for key in keys
            if ours.batch_get_v2([PoolTransfer(name, pools[name].indices(11), keys=[key])])[name][0]
        ]
        numbers = [keys.index(key) for key in stored]
        into = list(range(len(stored)))
        assert reader.batch_get_v2([PoolTransfer(name, target.indices(*into), keys=stored)]) == {
            name: [True] * len(stored)
        }
        assert all(
            torch.equal(target.page(at), pools[name].page(n)) for at, n in zip(into, numbers, strict=True)
        )


def test_unknown_policies_never_limit_the_prefix(make: Make) -> None:
    pool = HostPool(4)
    backend = make(pool)
    keys = keys_of("a", 3)
    backend.batch_set_v1(keys, pool.indices(0, 1, 2))
    groups = PoolTransfer(
        PoolName.DEEPSEEK_V4_C4,
        keys=keys,
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=1,
        group_pages=1,
    )
    assert backend.batch_exists_v2(keys, [groups]).kv_hit_pages == 3
    unknown = PoolTransfer(
        PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES
    )  # a pool that nobody registered
    assert backend.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0


def test_ranks_keep_apart_and_replicas_share(make: Make) -> None:
    pool = HostPool(4)
    pool.fill(5)
    keys = keys_of("a", 2)
    assert make(pool, tp_rank=0, tp_size=2).batch_set_v1(keys, pool.indices(0, 1)) == [True, True]
    assert make(pool, tp_rank=1, tp_size=2).batch_exists(keys) == 0
    assert make(pool, tp_rank=0, tp_size=2, dp_rank=1).batch_exists(keys) == 2
    assert make(pool, tp_rank=0, tp_size=2, settings={"weights_digest": "cd" * 32}).batch_exists(keys) == 0
    assert make(HostPool(4, "layer_first"), tp_rank=0, tp_size=2).batch_exists(keys) == 0
    assert (
        make(pool, tp_rank=0, tp_size=2, is_mla_model=True).batch_set_v1(keys, pool.indices(0, 1))
        == [True] * 2
    )
    assert make(pool, tp_rank=1, tp_size=2, is_mla_model=True).batch_exists(keys) == 2


def test_cleared_is_gone_for_this_backend(make: Make) -> None:
    pool = HostPool(4)
    backend = make(pool)
    keys = keys_of("a", 2)
    backend.batch_set_v1(keys, pool.indices(0, 1))
    assert backend.clear() is True
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, pool.indices(0, 1)) == [True, True]
    assert backend.batch_exists(keys) == 2


def test_what_an_earlier_server_stored_after_its_clear_is_not_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each clear may stand for other weights; two servers count theirs from 1."""
    pool = HostPool(4)
    keys = keys_of("a", 2)
    earlier, rank = make(pool), make(pool)
    monkeypatch.setattr(backend_module, "run_of_server", lambda: "another run")
    later = make(pool)
    for backend in (earlier, rank, later):
        assert backend.clear() is True
    assert earlier.batch_set_v1(keys, pool.indices(0, 1)) == [True, True]
    assert rank.batch_exists(keys) == 2, "another rank of the same server"
    assert later.batch_exists(keys) == 0


def run_of_rank(address: str, rank: int, told: Any) -> None:
    """Be a scheduler process of SGLang: it joins its engine's ranks, then makes its backend."""
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    run_of_server.cache_clear()
    told.put(run_of_server())
    torch.distributed.barrier()


def test_the_ranks_of_an_engine_share_a_run_and_two_engines_of_a_process_do_not() -> None:
    """Before: it was made of the parent process, and `sgl.Engine` starts its schedulers from the caller."""
    context = multiprocessing.get_context("fork")  # spawned as SGLang does it, each would import torch anew
    runs = []
    for _ in range(2):
        told, address = context.Queue(), f"tcp://127.0.0.1:{free_port()}"
        ranks = [context.Process(target=run_of_rank, args=(address, rank, told)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        runs += [told.get(timeout=60) for _ in ranks]
        for process in ranks:
            process.join(60)
    assert runs[0] == runs[1] != runs[2] == runs[3]
    assert run_of_server() == run_of_server()
    assert len(run_of_server()) == 16


def test_a_set_counts_only_what_is_stored(make: Make) -> None:
    """More pages at once than the daemon's 16 MiB of memory holds: each protects the one before."""
    pool = HostPool(800, page_size=256)
    pool.fill(6)
    backend = make(pool)
    keys = keys_of("a", 400)
    results = backend.batch_set_v1(keys, pool.indices(*range(400)))
    num_stored = results.index(False)
    assert 0 < num_stored < 400
    assert not any(results[num_stored:])
    assert backend.batch_exists(keys) == num_stored


EVERY_CALL: list[tuple[str, Callable[[KvtierStorage, HostPool], Any], Any]] = [
    ("exists", lambda b, _: b.exists("00" * 32), False),
    ("batch_exists", lambda b, _: b.batch_exists(["00" * 32]), 0),
    ("batch_get_v1", lambda b, p: b.batch_get_v1(["00" * 32] * 2, p.indices(0, 1)), [False, False]),
    ("batch_set_v1", lambda b, p: b.batch_set_v1(["00" * 32], p.indices(0)), [False]),
    ("get", lambda b, p: b.get("00" * 32, p.get_dummy_flat_data_page()), None),
    ("batch_get", lambda b, p: b.batch_get(["00" * 32], [p.get_dummy_flat_data_page()]), [None]),
    ("set", lambda b, p: b.set("00" * 32, p.page(0)), False),
    ("batch_set", lambda b, p: b.batch_set(["00" * 32], [p.page(0)]), False),
    (
        "batch_get_v2",
        lambda b, p: b.batch_get_v2([PoolTransfer(PoolName.KV, p.indices(0), keys=["00" * 32])]),
        {"kv": [False]},
    ),
    (
        "batch_set_v2",
        lambda b, p: b.batch_set_v2([PoolTransfer(PoolName.KV, p.indices(0), keys=["00" * 32])]),
        {"kv": [False]},
    ),
    ("batch_exists_v2", lambda b, _: b.batch_exists_v2(["00" * 32]).kv_hit_pages, 0),
]


@pytest.mark.parametrize(("name", "call", "nothing"), EVERY_CALL, ids=[name for name, _, _ in EVERY_CALL])
@pytest.mark.parametrize("trouble", ["nobody listens", "no pool", "a defect"])
def test_trouble_is_a_miss_and_never_an_exception(
    make: Make, name: str, call: Any, nothing: Any, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HostPool(4)
    settings = {"target": "unix:///nowhere/kvtier.sock"} if trouble == "nobody listens" else {}
    backend = make(None if trouble == "no pool" else pool, settings=settings)
    if trouble == "a defect":
        monkeypatch.setattr("kvtier.clients.sglang.backend.hash_of", lambda _: 1 / 0)
    for _ in range(3):
        assert call(backend, pool) == nothing
    assert backend.guard.causes or trouble == "no pool"


def test_slots_that_do_not_match_the_keys_are_refused(make: Make) -> None:
    pool = HostPool(4)
    backend = make(pool)
    keys = keys_of("a", 2)
    assert backend.batch_set_v1(keys, pool.indices(0)) == [False, False]
    assert backend.batch_set_v1([], pool.indices()) == []
    assert backend.batch_get_v1(keys, pool.indices(0, 1, 2)) == [False, False]
    assert backend.batch_set_v2([PoolTransfer(PoolName.KV, None, keys=keys)]) == {PoolName.KV: [False, False]}
    assert backend.guard.causes == {}  # seen, not stumbled over


def test_pages_are_linked_to_what_they_continue(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(4)
    backend = make(pool)
    keys = keys_of("a", 4)
    parents = []
    store = backend._sets.store

    def recording(*arguments: Any, **named: Any) -> Any:
        parents.append(named["parent"].hex())
        return store(*arguments, **named)

    monkeypatch.setattr(backend._sets, "store", recording)
    backend.batch_set_v1(keys[:2], pool.indices(0, 1), HiCacheStorageExtraInfo())
    backend.batch_set_v1(keys[2:3], pool.indices(2), HiCacheStorageExtraInfo(prefix_keys=keys[:2]))
    backend.batch_set_v2(
        [PoolTransfer(PoolName.KV, pool.indices(3), keys=keys[3:])],
        HiCacheStorageExtraInfo(prefix_keys=keys[:3]),
    )
    assert parents == ["", keys[1], keys[2]]


def test_three_threads_as_sglang_has_them(make: Make) -> None:
    pool, into = HostPool(64), HostPool(64)
    pool.fill(7)
    backend = make(pool)
    reader = make(into)
    prompts = [keys_of(f"thread {n}", 8) for n in range(8)]
    problems: list[str] = []

    def write() -> None:
        for n, keys in enumerate(prompts):
            if backend.batch_set_v1(keys, pool.indices(*range(n * 8, n * 8 + 8))) != [True] * 8:
                problems.append(f"set {n}")

    def ask() -> None:
        for _ in range(40):
            counts = [backend.batch_exists(keys) for keys in prompts]
            if not all(0 <= count <= 8 for count in counts):
                problems.append(f"exists {counts}")

    def read() -> None:
        for _ in range(20):
            for n, keys in enumerate(prompts):
                found = reader.batch_get_v1(keys, into.indices(*range(n * 8, n * 8 + 8)))
                problems.extend(
                    f"get {n} {page}"
                    for page, is_there in enumerate(found)
                    if is_there and not torch.equal(into.page(n * 8 + page), pool.page(n * 8 + page))
                )

    threads = [threading.Thread(target=work) for work in (write, ask, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert backend.guard.causes == {}
    assert all(reader.batch_exists(keys) == 8 for keys in prompts)


def test_mistakes_are_told_when_the_backend_is_attached(make: Make) -> None:
    with pytest.raises(ValueError, match="unknown setting 'taget'"):
        make(settings={"taget": "unix:///x"})
    with pytest.raises(ValueError, match="give their folder, or a digest"):
        make(settings={"weights_digest": ""})
