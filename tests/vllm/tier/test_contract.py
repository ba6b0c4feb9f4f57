"""KvtierTier under vLLM's real TieringOffloadingManager and primary pool, with a real daemon, without an
engine.

The manager is driven as the scheduler drives it: lookups inside a step, `on_schedule_end` at its end. What
is checked besides the answers: that the pool is given back, that no hook raises, and that the interface is
the one this tier was written for.
"""

import inspect
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvtier.clients.vllm_tier import KvtierTier
from kvtier.clients.vllm_tier import manager as tier_module

from ...daemon import Daemon
from .. import patience

ROW_BYTES = 16 << 10
NUM_CHUNKS = 16
TOKENS = 32
WAIT_S = 60.0
DIGEST = "5a" * 32
NOTHING_SCHEDULED = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def offloading_config(**changes: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    config = OffloadingConfig(
        groups=(
            OffloadingGroupConfig(TOKENS, ("layer.0",), 0),
            OffloadingGroupConfig(TOKENS, ("layer.1",), 1),
        ),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name=f"test/{uuid.uuid4().hex}", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=parallel,
        kv_cache_layout="LBNHC",
    )
    return replace(config, **changes)


@dataclass
class Engine:
    """What the scheduler side of one engine is made of. `view` is the primary pool."""

    manager: TieringOffloadingManager
    tier: KvtierTier
    view: memoryview

    def step(self) -> None:
        self.manager.on_schedule_end(NOTHING_SCHEDULED)

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            self.step()
            assert time.monotonic() < deadline_s, "it never came to that"

    def store(self, request: ReqContext, keys: list[Any], seed: int) -> np.ndarray[Any, Any]:
        """Offload chunks of random bytes, as a worker would have copied them; return the bytes."""
        prepared = self.manager.prepare_store(keys, request)
        assert prepared is not None
        assert prepared.keys_to_store == keys
        data = np.random.default_rng(seed).integers(-128, 128, (len(keys), ROW_BYTES), np.int8)
        np.asarray(self.view)[prepared.store_spec.chunk_ids] = data
        self.manager.complete_store(keys, request)
        self.until(lambda: not self.manager._jobs)
        return data

    def lookup(self, request: ReqContext, keys: list[Any]) -> list[LookupResult]:
        """Ask step by step, as a scheduler does for a request that waits, until all is known and there."""
        answers: list[LookupResult] = []

        def are_final() -> bool:
            answers[:] = [self.manager.lookup(key, request) for key in keys]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers)

        self.until(are_final)
        return answers

    def read(self, request: ReqContext, keys: list[Any]) -> np.ndarray[Any, Any]:
        spec = self.manager.prepare_load(keys, request)
        data: np.ndarray[Any, Any] = np.asarray(self.view)[spec.chunk_ids].copy()
        self.manager.complete_load(keys, request)
        return data

    def finish(self, request: ReqContext) -> None:
        self.manager.on_request_finished(request)
        self.step()


def request(manager: TieringOffloadingManager, name: str, keys: list[Any]) -> ReqContext:
    context = ReqContext(req_id=name)
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, (number + 1) * TOKENS)
    manager.on_new_request(context)
    return context


def keys_of(prompt: int, num_chunks: int, group: int = 0) -> list[Any]:
    return [
        make_offload_key(prompt.to_bytes(4, "big") * 7 + n.to_bytes(4, "big"), group)
        for n in range(num_chunks)
    ]


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(shared_daemon: Daemon) -> Iterator[MakeEngine]:
    """Make engines of the shared daemon; those with equal `config` share what they store."""
    made: list[Engine] = []

    def make(config: OffloadingConfig | None = None, **settings: Any) -> Engine:
        config = replace(config, engine_id=uuid.uuid4().hex) if config else offloading_config()
        region = SharedOffloadRegion(config.engine_id, NUM_CHUNKS, None, ROW_BYTES, ROW_BYTES)
        primary = CPUPrimaryTierOffloadingManager(NUM_CHUNKS, region)
        view = primary.get_kv_memoryview()
        entry = {
            "type": "KvtierTier",
            "module_path": "kvtier.clients.vllm_tier",
            "target": shared_daemon.target,
            "weights_digest": DIGEST,
            "variant": config.model.name,  # nobody else's in the shared daemon
            **patience.TIER,
            **settings,
        }
        try:
            tier = SecondaryTierFactory.create_secondary_tier(entry, view, SimpleNamespace(config=config))
        except BaseException:
            region.cleanup()
            raise
        assert isinstance(tier, KvtierTier)
        made.append(Engine(TieringOffloadingManager(primary, [tier]), tier, view))
        return made[-1]

    yield make
    for engine in made:
        assert engine.tier.store_lane.check_integrity() + engine.tier.load_lane.check_integrity() == []
        pool = engine.manager.primary_tier._mmap_region.mmap_obj
        engine.manager.shutdown()
        assert pool.closed, "somebody still holds memory of the pool"


def test_the_interface_is_the_one_this_tier_was_written_for() -> None:
    assert issubclass(KvtierTier, SecondaryTierManager)
    assert not inspect.isabstract(KvtierTier)
    for name in SecondaryTierManager.__abstractmethods__:
        theirs = inspect.signature(getattr(SecondaryTierManager, name))
        ours = inspect.signature(inspect.unwrap(getattr(KvtierTier, name)))
        assert list(ours.parameters) == list(theirs.parameters), name
    assert {one.name for one in fields(OffloadingConfig)} == {
        *(
            "groups",
            "worker_kv_bytes_per_block",
            "enable_kv_cache_events",
            "extra_config",
            "engine_id",
            "model",
        ),
        *("cache", "parallel", "replicated_layout", "canonical_layout", "kv_cache_layout"),
    }, "something new may shape the bytes: look at identity.py"
    assert "_offload_key_positions" in {one.name for one in fields(ReqContext)}


def test_another_engine_finds_what_one_stored(make_engine: MakeEngine) -> None:
    config = offloading_config()
    one, other = make_engine(config), make_engine(config)
    keys = keys_of(1, 6)
    first = request(one.manager, "a", keys)
    data = one.store(first, keys, seed=1)
    one.finish(first)
    second = request(other.manager, "b", keys)
    assert other.manager.lookup(keys[0], second) is LookupResult.RETRY  # never waits
    assert other.lookup(second, keys) == [LookupResult.HIT] * 6
    assert np.array_equal(other.read(second, keys), data)
    other.finish(second)
    assert other.tier.lookups._lookup_state == {}  # a verdict lives as long as its requests


def test_groups_are_kept_apart_and_windows_are_found(make_engine: MakeEngine) -> None:
    config = offloading_config()
    one, other = make_engine(config), make_engine(config)
    full, window = keys_of(2, 6), keys_of(2, 6, group=1)
    asked = request(one.manager, "a", full)
    for number, key in enumerate(window):
        asked.set_offload_key_position(key, (number + 1) * TOKENS)
    data = one.store(asked, [*full, *window[2:4]], seed=2)
    again = request(other.manager, "b", full)
    for number, key in enumerate(window):
        again.set_offload_key_position(key, (number + 1) * TOKENS)
    assert other.lookup(again, full) == [LookupResult.HIT] * 6
    from_the_end = other.lookup(again, window[::-1])
    assert from_the_end == [LookupResult.MISS] * 2 + [LookupResult.HIT] * 2 + [LookupResult.MISS] * 2
    assert np.array_equal(other.read(again, [*full, *window[2:4]]), data)


def test_more_than_the_pool_holds_survives_below(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = {number: keys_of(number, 4) for number in range(10, 20)}  # 40 chunks through a pool of 16
    stored = {}
    for number, keys in prompts.items():
        asked = request(engine.manager, f"store {number}", keys)
        stored[number] = engine.store(asked, keys, seed=number)
        engine.finish(asked)
    for number, keys in prompts.items():
        asked = request(engine.manager, f"load {number}", keys)
        assert engine.lookup(asked, keys) == [LookupResult.HIT] * 4
        assert np.array_equal(engine.read(asked, keys), stored[number])
        engine.finish(asked)


def test_a_load_that_finds_nothing_is_a_miss_and_not_asked_again(make_engine: MakeEngine) -> None:
    config = offloading_config()
    one, other = make_engine(config), make_engine(config)
    keys = keys_of(3, 4)
    one.store(request(one.manager, "a", keys), keys, seed=3)
    asked = request(other.manager, "b", keys)
    other.until(lambda: LookupResult.HIT_PENDING in {other.manager.lookup(key, asked) for key in keys})
    other.tier.identity = replace(other.tier.identity, epoch="gone")  # between the answer and the load
    assert other.lookup(asked, keys) == [LookupResult.MISS] * 4
    assert other.tier.guard.causes == {"GONE_BEFORE_LOAD": 4}
    stats = other.manager.get_stats()
    assert stats is not None
    assert f"{tier_module.LOST}:('GONE_BEFORE_LOAD',)" in stats.reduce()


@pytest.fixture
def crowded(
    make_engine: MakeEngine,
) -> Callable[..., tuple[Engine, Callable[[], None], ReqContext, list[Any]]]:
    """Make an engine with 4 of 16 rows left: others load the rest; how they end; and a prompt of 10 chunks
    that is stored below."""

    def make(wait_s: float) -> tuple[Engine, Callable[[], None], ReqContext, list[Any]]:
        config = offloading_config()
        one, engine = make_engine(config), make_engine(config, wait_for_room_s=wait_s)
        theirs, ours = keys_of(8, 12), keys_of(9, 10)
        for number, keys in enumerate((theirs, ours)):
            asked = request(one.manager, str(number), keys)
            one.store(asked, keys, seed=number)
            one.finish(asked)
        loading = request(engine.manager, "loading", theirs)
        assert engine.lookup(loading, theirs) == [LookupResult.HIT] * 12
        engine.manager.prepare_load(theirs, loading)
        asked = request(engine.manager, "asked", ours)
        return engine, lambda: engine.manager.complete_load(theirs, loading), asked, ours

    return make


def test_a_request_waits_for_room(crowded: Any) -> None:
    engine, end, asked, keys = crowded(WAIT_S)
    wanted = [LookupResult.HIT] * 4 + [LookupResult.RETRY] * 6
    engine.until(lambda: [engine.manager.lookup(key, asked) for key in keys] == wanted)
    for _ in range(50):
        engine.step()
        assert [engine.manager.lookup(key, asked) for key in keys] == wanted
    end()
    assert engine.lookup(asked, keys) == [LookupResult.HIT] * 10
    assert engine.tier.guard.causes == {}


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_a_request_waits_no_longer(crowded: Any, wait_s: float) -> None:
    engine, end, asked, keys = crowded(wait_s)
    assert engine.lookup(asked, keys) == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 6
    assert set(engine.tier.guard.causes) == {tier_module.NO_ROOM}
    end()


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_a_prompt_larger_than_the_pool_is_found_in_part(make_engine: MakeEngine, wait_s: float) -> None:
    """With a tier that always says yes each chunk would push out one before it, for ever."""
    config = offloading_config()
    one, engine = make_engine(config), make_engine(config, wait_for_room_s=wait_s)
    keys = keys_of(11, NUM_CHUNKS + 4)
    asked = request(one.manager, "a", keys)
    for start in range(0, len(keys), 4):
        one.store(asked, keys[start : start + 4], seed=start)
    one.finish(asked)
    again = request(engine.manager, "b", keys)
    answers = engine.lookup(again, keys)
    assert answers == [LookupResult.HIT] * NUM_CHUNKS + [LookupResult.MISS] * 4
    engine.finish(again)


def test_after_a_reset_nothing_from_before_is_found(make_engine: MakeEngine) -> None:
    config = offloading_config()
    engine, keeping = make_engine(config), make_engine(config, on_reset="keep")
    keys = keys_of(4, 4)
    asked = request(engine.manager, "a", keys)
    engine.store(asked, keys, seed=4)
    engine.finish(asked)
    for one, expected in ((engine, LookupResult.MISS), (keeping, LookupResult.HIT)):
        one.manager.reset_cache()
        again = request(one.manager, "b", keys)
        assert one.lookup(again, keys) == [expected] * 4
        one.finish(again)
    fresh = request(engine.manager, "c", keys)
    data = engine.store(fresh, keys, seed=5)
    engine.manager.primary_tier.reset_cache()
    assert engine.lookup(fresh, keys) == [LookupResult.HIT] * 4
    assert np.array_equal(engine.read(fresh, keys), data)


def test_too_many_waiting_stores_are_dropped_and_the_pool_is_given_back(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_waiting_fraction=0.25)  # of 16 chunks
    with engine.tier.store_lane._changed:  # the lane's thread cannot take a job meanwhile
        for number in range(3):
            keys = keys_of(30 + number, 3)
            asked = request(engine.manager, str(number), keys)
            engine.manager.prepare_store(keys, asked)
            engine.manager.complete_store(keys, asked)
    engine.until(lambda: not engine.manager._jobs)
    assert engine.tier.guard.causes == {"STORE_QUEUE_FULL": 6}


def test_nothing_leaves_a_hook(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    keys = keys_of(5, 2)
    asked = request(engine.manager, "a", keys)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(engine.tier.lookups, "lookup", broken)
    monkeypatch.setattr(engine.tier.lookups, "cleanup", broken)
    monkeypatch.setattr(engine.tier.lookups, "flush", broken)
    monkeypatch.setattr(engine.tier.lookups, "mark_miss", broken)
    monkeypatch.setattr(tier_module, "runs_of", broken)
    assert engine.manager.lookup(keys[0], asked) is LookupResult.MISS
    prepared = engine.manager.prepare_store(keys, asked)
    assert prepared is not None
    engine.manager.complete_store(keys, asked)
    engine.until(lambda: not engine.manager._jobs)  # the job ends, as failed
    engine.finish(asked)
    assert engine.tier.guard.causes["PLUGIN_BUG"] >= 4


def test_settings_reach_vllm(make_engine: MakeEngine) -> None:
    engine = make_engine(offload="request", locality="LOCAL")
    context = ReqContext(req_id="a")
    assert engine.tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    assert engine.tier.locality is not None
    with pytest.raises(ValueError, match="unknown setting 'taget'"):
        make_engine(taget="unix:///x")
    with pytest.raises(ValueError, match="neither a local path"):
        make_engine(weights_digest="")


def test_without_an_appliance_everything_is_a_miss_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(target="unix:///nowhere/kvtier.sock")
    keys = keys_of(6, 4)
    asked = request(engine.manager, "a", keys)
    engine.store(asked, keys, seed=6)
    engine.manager.primary_tier.reset_cache()
    assert engine.lookup(asked, keys) == [LookupResult.MISS] * 4
    engine.finish(asked)
    for number in range(50):  # no thread is asked any more
        context = request(engine.manager, str(number), keys)
        if engine.tier.guard.breaker.turns_away():
            assert engine.tier.lookup(keys[0], context) in (LookupResult.MISS, LookupResult.RETRY)
        engine.finish(context)
    assert set(engine.tier.guard.causes) <= {"NOT_RUNNING", "BREAKER_OPEN"}
