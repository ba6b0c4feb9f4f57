"""What the connector assumes about vLLM, and what it promises to it. A new version of vLLM starts here.

The surface is compared by name: a hook that is new, gone or has other parameters fails a test, and somebody
has to think about it before the version joins versions.TESTED.
"""

import inspect
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm import __version__ as vllm_version
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvtier.clients import Geometry, NamespaceIdentity, Tier
from kvtier.clients.errors import InvalidRequest
from kvtier.clients.vllm import connector as module
from kvtier.clients.vllm import engine
from kvtier.clients.vllm.connector import KvtierConnector
from kvtier.clients.vllm.messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata
from kvtier.clients.vllm.metrics import KvtierStats
from kvtier.clients.vllm.names import block_names
from kvtier.clients.vllm.plan import Ack, Acks, Load
from kvtier.clients.vllm.scheduler.announcer import Block
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer, PendingLookup
from kvtier.clients.vllm.versions import is_tested, minor_of, misfits

BLOCK = 128
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
# All that vLLM 0.32 calls on a connector. What is not ours keeps its default on purpose:
NOT_OURS = {
    # bookkeeping
    "clear_connector_metadata", "has_connector_metadata", "role",
    "bind_kv_cache_manager",  # ends in bind_gpu_block_pool
    # all cacheable groups; no recurrent state
    "get_loaded_kv_cache_group_ids", "supports_divergent_local_hybrid_hits",
    # any memory, any layout
    "get_mem_pool_context", "set_host_xfer_buffer_ops", "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph", "reset_capture_state", "finish_forward",  # no layer hooks
    "handle_preemptions",  # saved blocks are held by reference, so nothing is overwritten
    "register_finished_partial_tail", "has_pending_block_frees",  # whole blocks only; saves free soon
    "get_finished_count", "set_xfer_handshake_metadata", "get_kv_connector_kv_cache_events",
}  # fmt: skip


VERSION = minor_of(vllm_version) or (0, 0)
NEWER: set[str] = set()  # ours, and asked for by newer versions only
if VERSION < (0, 32):
    NOT_OURS.discard("get_loaded_kv_cache_group_ids")
    NEWER.add("get_external_cache_hit_sources")
if VERSION < (0, 31):
    NOT_OURS.discard("get_mem_pool_context")
if VERSION < (0, 30):
    NOT_OURS -= {"bind_kv_cache_manager", "reset_capture_state", "finish_forward"}
    NOT_OURS -= {"register_finished_partial_tail", "has_pending_block_frees"}
    NEWER.add("get_transfer_results")
if VERSION < (0, 29):
    NOT_OURS |= {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache"}  # a tensor per layer
if VERSION == (0, 33):  # on a GPU, sleep mode makes a model a miss: nothing is registered
    NOT_OURS |= {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


def config(**extra: Any) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="KvtierConnector",
        kv_connector_module_path="kvtier.clients.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"target": "unix:///nobody/listens.sock", **extra},
    )
    made: VllmConfig = PLAIN.__class__.__new__(PLAIN.__class__)
    made.__dict__.update(PLAIN.__dict__)
    made.kv_transfer_config = transfer
    return made


PLAIN = VllmConfig()
PLAIN.cache_config.block_size = BLOCK


def caches(*specs: Any) -> KVCacheConfig:
    specs = specs or (FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32),)
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)


def make(role: KVConnectorRole = SCHEDULER, kv_caches: KVCacheConfig | None = None, **extra: Any) -> Any:
    return KVConnectorFactory.create_connector(config(**extra), role, kv_caches or caches())


def request(num_tokens: int, name: str = "r", salt: str | None = None) -> Request:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    return Request(
        name,
        list(range(num_tokens)),
        SamplingParams(max_tokens=4),
        None,
        block_hasher=get_request_block_hasher(BLOCK, hash_fn),
        cache_salt=salt,
    )


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_names_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # 0.28 has no stable names without
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    tokens = [0, 23, 24, 255, 256, 65_536, 151_000, *range(3 * BLOCK)]
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    own = Request("r", tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher).block_hashes
    assert block_names(tokens, BLOCK, algorithm=algorithm, seed="7") == list(own)
    if engine.NAMES_ARE_STABLE:
        monkeypatch.delenv("PYTHONHASHSEED")
        init_none_hash(hash_fn)
        own = Request("r", tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher).block_hashes
        assert block_names(tokens, BLOCK, algorithm=algorithm) == list(own)


class LookupAgent:
    """Answers with what it is told."""

    def __init__(self) -> None:
        self.asked: list[PendingLookup] = []
        self.announced: list[Block] = []

    def announce(self, blocks: list[Block]) -> None:
        self.announced += blocks

    def allows(self) -> bool:
        return True

    def ask(self, question: Any) -> PendingLookup:
        self.asked.append(PendingLookup(question, time.monotonic()))
        return self.asked[-1]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, LookupAgent, BlockPool]:
    """A connector on the scheduler's side after the handshake with two ranks, its block pool bound."""
    agent = LookupAgent()
    monkeypatch.setattr(module, "Agent", lambda *arguments, **named: agent)
    connector = make()
    connector._has_listeners = True
    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=BLOCK)
    connector.bind_gpu_block_pool(pool)
    geometry = Geometry(1, 2, 64, BLOCK, "float32")
    connector.set_xfer_handshake_metadata_pp_aware(
        {
            (0, rank): KvtierHandshake([NamespaceIdentity(bytes(32), geometry, shard=str(rank))])
            for rank in (0, 1)
        }
    )
    return connector, agent, pool


# ------------------------------------------------------------------------------------------- surface


def test_the_installed_version_is_tested() -> None:
    assert is_tested(vllm_version)


def test_every_hook_of_this_version_is_known() -> None:
    hooks = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    ours = {name for name in vars(KvtierConnector) if not name.startswith("_")}
    assert hooks - ours == NOT_OURS
    assert ours - hooks == {"request_finished_all_groups", *NEWER}
    assert supports_hma(KvtierConnector)
    assert not inspect.isabstract(KvtierConnector)


def test_hooks_take_what_the_engine_passes() -> None:
    assert misfits(KVConnectorBase_V1, KvtierConnector) == []


def test_an_older_version_runs_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.27.0")
    connector = make()
    assert connector.why_dark.startswith("vLLM 0.27.0 is older than")
    assert_serves_nothing(connector)


def test_a_newer_version_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert make()._why_dark == ""


def test_a_newer_version_that_passes_more_runs_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_connector_meta(self: Any, scheduler_output: Any, stream: Any) -> None: ...

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(KVConnectorBase_V1, "build_connector_meta", build_connector_meta)
    connector = make()
    assert connector.why_dark == "vLLM 0.99.0 calls build_connector_meta(self, scheduler_output, stream)"
    assert_serves_nothing(connector)


def test_a_newer_version_that_demands_more_runs_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(KvtierConnector, "__abstractmethods__", frozenset({"wake_up"}))
    connector = make()
    assert connector.why_dark == "vLLM 0.99.0 demands wake_up"
    assert_serves_nothing(connector)


def test_a_newer_version_without_a_name_that_is_used_runs_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    monkeypatch.delitem(sys.modules, module.__name__)
    connector = make()
    assert connector.why_dark.startswith("vLLM 0.99.0 lacks what kvtier uses: cannot import name")
    assert_serves_nothing(connector)


def assert_serves_nothing(connector: Any) -> None:
    """Every hook of a step, also with arguments that are not known here."""
    assert supports_hma(type(connector))
    assert connector.requires_kv_delivery is False
    assert connector.get_num_new_matched_tokens(request(300), 0, stream=1) == (0, False)
    assert connector.update_state_after_alloc(None, None, 0, 1) is None
    meta = connector.build_connector_meta(SimpleNamespace(), 1)
    connector.bind_connector_metadata(meta)
    assert connector.start_load_kv(None, 1) is None
    assert connector.wait_for_layer_load("layer0") is None
    assert connector.save_kv_layer("layer0", None, None) is None
    assert connector.wait_for_save() is None
    connector.clear_connector_metadata()
    assert connector.get_handshake_metadata() is None
    assert connector.request_finished_all_groups(None, ()) == (False, None)


def test_a_wrong_option_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequest, match="unknown setting 'tagret'"):
        make(tagret="unix:///x")


def test_the_name_is_enough_where_the_package_is_installed() -> None:
    """By entry point, as `vllm serve` finds it."""
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="kvtier")
    found.load()()
    found.load()()  # loaded in every process, and sometimes twice
    assert KVConnectorFactory.get_connector_class_by_name("KvtierConnector") is KvtierConnector


def test_lost_blocks_are_recomputed_whatever_is_configured() -> None:
    connector = make()
    assert connector._kv_transfer_config.kv_load_failure_policy == "recompute"
    assert connector.requires_kv_delivery is False


def test_a_cache_that_cannot_be_kept_is_a_miss() -> None:
    mamba = MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,))
    connector = make(kv_caches=caches(mamba))
    assert connector.get_num_new_matched_tokens(request(300), 0) == (0, False)
    assert connector.build_connector_meta(SimpleNamespace()).plan.loads == []
    assert "MambaSpec" in connector.get_handshake_metadata().why_not


@pytest.mark.parametrize("kind", [InvalidRequest, KeyError, NotImplementedError])
def test_a_model_that_cannot_be_named_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def describe(*_: Any) -> Any:
        raise kind("no weights here")

    monkeypatch.setattr(module, "describe_groups", describe)
    connector = make(WORKER)
    connector.register_kv_caches({"layer0": torch.zeros(16, 2, BLOCK, 128)})
    assert "no weights here" in connector.get_handshake_metadata().why_not
    scheduler = make()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): connector.get_handshake_metadata()})
    assert scheduler.get_num_new_matched_tokens(request(300), 0) == (0, False)


def test_a_worker_that_says_nothing_makes_it_a_miss() -> None:
    connector = make()
    connector.set_xfer_handshake_metadata_pp_aware({})
    connector.update_connector_output(KVConnectorOutput())
    assert connector._why_dark == "0 of 1 workers have said what they hold"
    assert connector.get_num_new_matched_tokens(request(300), 0) == (0, False)


# ------------------------------------------------------------------------------------ what vLLM gives


def test_block_hashes_are_32_bytes_and_the_same_everywhere() -> None:
    """Two engines share blocks by them. The value is that of vLLM 0.32 with sha256."""
    first = request(2 * BLOCK + 5)
    assert [len(name) for name in first.block_hashes] == [32, 32]
    assert first.block_hashes == request(2 * BLOCK).block_hashes
    assert first.block_hashes != request(2 * BLOCK, salt="tenant").block_hashes


def test_a_request_through_the_scheduler_hooks(ready: tuple[Any, LookupAgent, BlockPool]) -> None:
    connector, agent, pool = ready
    one = request(3 * BLOCK)
    connector.on_new_request(one)
    assert connector.get_num_new_matched_tokens(one, 0) == (None, False)
    agent.asked[0].answer = LookupAnswer(2 * BLOCK, (2,), (Tier.DRAM, Tier.NVME))
    assert connector.get_num_new_matched_tokens(one, 0) == (2 * BLOCK, True)
    blocks = pool.get_new_blocks(2)
    connector.update_state_after_alloc(one, KVCacheBlocks((blocks,)), 2 * BLOCK)
    sources = connector.get_external_cache_hit_sources(one, 2 * BLOCK)
    if engine.SOURCES:  # an engine that asks
        assert sources == {engine.SOURCES["host"]: BLOCK, engine.SOURCES["disk"]: BLOCK}
    meta = connector.build_connector_meta(step({}, {}))
    assert isinstance(meta, KvtierMetadata)
    assert [part.block_ids for part in meta.plan.loads[0].parts] == [[block.block_id for block in blocks]]
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    one.num_computed_tokens = 2 * BLOCK
    table = [block.block_id for block in [*blocks, *pool.get_new_blocks(1)]]
    meta = connector.build_connector_meta(step({"r": BLOCK}, {"r": (table,)}))
    (save,) = meta.plan.saves
    assert save.block_ids == table[2:]
    assert pool.blocks[table[2]].ref_cnt == 2
    assert connector.has_pending_push_work()
    assert connector.request_finished_all_groups(one, (table,)) == (False, None)
    told = KvtierWorkerMetadata(Acks({save.job: Ack(2, 1)}))
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert pool.blocks[table[2]].ref_cnt == 1
    assert not connector.has_pending_push_work()


class DemandingConnector:
    """As NixlConnector: its own handshake, or the engine ends. Everything else is as nothing."""

    def get_handshake_metadata(self) -> Any:
        return SimpleNamespace(is_demanding=True)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        assert all(one.is_demanding for one in metadata.values())

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def under_multi(connector: Any, order: int, other: Any) -> Any:
    multi = object.__new__(MultiConnector)
    children = [connector, other][::order] if other else [connector]
    vars(multi).update(_connectors=children, _extra_async_saves={}, _requests_to_connector={})
    vars(multi).update(_all_support_hma=True, _connector_metadata=None)
    return multi


@pytest.mark.parametrize(
    ("order", "other"), [(1, DemandingConnector()), (-1, DemandingConnector()), (1, None)]
)
def test_under_multiconnector_an_empty_step_brings_the_handshakes(
    monkeypatch: pytest.MonkeyPatch, order: int, other: Any
) -> None:
    """vLLM's MultiConnector gives all children the handshake of the first one that has one."""
    monkeypatch.setattr(module, "Agent", lambda *arguments, **named: LookupAgent())
    monkeypatch.setattr(PLAIN.parallel_config, "world_size", 2)
    connector, workers = make(), []
    for rank in range(2):
        with set_current_vllm_config(PLAIN):
            workers.append(make(KVConnectorRole.WORKER))
        workers[-1]._vllm_config.parallel_config = SimpleNamespace(rank=rank)
        workers[-1]._identities = [NamespaceIdentity(bytes(32), Geometry(1, 2, 64, BLOCK, "float32"))]
    multi, of_workers = (
        under_multi(connector, order, other),
        [under_multi(worker, order, other) for worker in workers],
    )
    handshakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(of_workers)}
    multi.set_xfer_handshake_metadata_pp_aware({at: one for at, one in handshakes.items() if one is not None})
    assert connector.get_num_new_matched_tokens(request(4 * BLOCK), 0) == (0, False)
    assert multi.has_pending_push_work(), "a step before any request"
    meta = multi.build_connector_meta(step({}, {}))
    assert not multi.has_pending_push_work(), "one is enough"
    reports = []
    for worker in of_workers:
        worker.bind_connector_metadata(meta)
        reports.append(worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
    told = reports[1].aggregate(reports[0])
    multi.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert connector.get_num_new_matched_tokens(request(4 * BLOCK), 0) == (None, False)
    of_workers[0].bind_connector_metadata(multi.build_connector_meta(step({}, {})))
    assert of_workers[0].build_connector_worker_meta() is None, "asked once"


def test_beside_nixl_under_multiconnector_both_hand_over(ready: tuple[Any, LookupAgent, BlockPool]) -> None:
    """vLLM's own MultiConnector merges what its children answer, and ends the engine when two use one key."""
    connector, agent, pool = ready
    vars(agent)["where"] = lambda *_: (7, bytes(32))
    of_nixl = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]]}
    nixl = SimpleNamespace(request_finished_all_groups=lambda *_: (True, of_nixl))
    multi = under_multi(connector, 1, nixl)
    one = request(2 * BLOCK)
    one.kv_transfer_params = {"do_remote_decode": True}
    connector.on_new_request(one)
    one.num_computed_tokens = 2 * BLOCK
    table = [block.block_id for block in pool.get_new_blocks(2)]
    is_sending, told = multi.request_finished_all_groups(one, (table,))
    assert is_sending, "NIXL's blocks stay until they are read"
    assert told == {**of_nixl, "kvtier_source": told["kvtier_source"]}
    assert told["kvtier_source"]["num_tokens"] == 2 * BLOCK
    other = request(3 * BLOCK)
    other.request_id, other.kv_transfer_params = "other", told
    connector.on_new_request(other)
    assert agent.asked[-1].question.source is None, "NIXL brings it: it is not waited for as well"


def step(scheduled: dict[str, int], tables: dict[str, Any]) -> Any:
    """A step of the scheduler; `tables` are those of requests that run for the first time."""
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    new = [SimpleNamespace(req_id=name, block_ids=table) for name, table in tables.items()]
    made = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        finished_req_ids=set(),
    )
    kind = getattr(scheduler_output, "KVConnectorBlockState", None)
    if kind and "block_ids" in kind.__annotations__:  # 0.29: tables of some requests, states of all
        made.kv_connector_block_state = kind({}, {})
    elif engine.STEPS_HAVE_TABLES:
        made.kv_connector_block_state = scheduler_output.KVConnectorBlockState(
            set(scheduled), tables.__getitem__, {}
        )
    return made


def test_tables_are_followed_through_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an engine that does not hand them over; a request that was preempted begins anew."""
    monkeypatch.setattr(engine, "STEPS_HAVE_TABLES", False)
    tables = engine.BlockTables()
    given = [1, 2]
    first = step({"r": 256, "s": 5}, {"r": (given, [7]), "s": ([3], [4])})
    assert tables.table(first, "r") == ([1, 2], [7])
    second = step({"r": 1}, {})
    second.scheduled_cached_reqs.req_ids = ["r", "s"]
    second.scheduled_cached_reqs.new_block_ids = [([5], [6]), None]
    tables.take_in(second)
    tables.take_in(second)  # the same step, once
    assert (tables.table(second, "r"), given) == (([1, 2, 5], [7, 6]), [1, 2])
    third = step({"r": 1}, {})
    third.finished_req_ids = {"s"}
    third.scheduled_cached_reqs.req_ids, third.scheduled_cached_reqs.new_block_ids = ["r"], [([9], [8])]
    third.scheduled_cached_reqs.resumed_req_ids = {"r"}
    assert tables.table(third, "r") == ([9], [8])
    with pytest.raises(KeyError):
        tables.table(third, "s")
    tables.forget()
    with pytest.raises(KeyError):  # rather than a table that lacks what a missed step added
        tables.table(step({"r": 1}, {}), "r")


def test_an_engine_that_wants_blocks_is_told_the_blocks_of_failed_loads(
    ready: tuple[Any, LookupAgent, BlockPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "TAKES_FAILED_LOADS", False)
    connector, agent, pool = ready
    one = request(3 * BLOCK)
    connector.get_num_new_matched_tokens(one, 0)
    agent.asked[0].answer = LookupAnswer(2 * BLOCK, (2,), (Tier.DRAM, Tier.DRAM))
    assert connector.get_num_new_matched_tokens(one, 0) == (2 * BLOCK, True)
    blocks = pool.get_new_blocks(3)
    connector.update_state_after_alloc(one, KVCacheBlocks((blocks,)), 2 * BLOCK)
    meta = connector.build_connector_meta(step({}, {}))
    lost = {block.block_id for block in blocks[:2]}

    worker = make(WORKER)
    worker._worker = SimpleNamespace(start_loads=lambda plan: None, take_loaded=lambda: ({"r"}, {"r"}))
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == lost
    assert worker.get_block_ids_with_load_errors() == set()

    connector.update_connector_output(KVConnectorOutput(invalid_block_ids=lost))  # one of two ranks
    assert connector.counters.take()["hits"] == 1
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert connector.counters.take()["misses_load_failed"] == 1
    assert connector.get_num_new_matched_tokens(one, 0) == (0, False)


def test_names_that_other_processes_cannot_know_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "NAMES_ARE_STABLE", False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED=0" in make()._why_dark
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert make()._why_dark == ""


def test_several_groups_are_a_miss_where_a_failed_load_would_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    assert make(kv_caches=caches(spec, spec))._why_dark == "" or not engine.TAKES_FAILED_LOADS
    monkeypatch.setattr(engine, "TAKES_FAILED_LOADS", False)
    connector = make(kv_caches=caches(spec, spec))
    assert "2 KV cache groups" in connector._why_dark
    assert connector.get_num_new_matched_tokens(request(300), 0) == (0, False)


def test_the_engines_own_blocks_are_seen(ready: tuple[Any, LookupAgent, BlockPool]) -> None:
    connector, agent, pool = ready
    one = request(3 * BLOCK + 1)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(one, blocks, 0, 2, BLOCK, 0)
    connector.on_new_request(one)
    assert agent.asked[0].question.first_token == 2 * BLOCK


def test_two_ranks_end_a_load_and_a_save_together() -> None:
    """vLLM's own aggregator, as with tensor parallelism 2."""
    aggregator = KVOutputAggregator(expected_finished_count=2)

    def output(finished: set[str], failed: set[str], acks: Acks | None, stats: dict[str, float]) -> Any:
        told = KvtierWorkerMetadata(acks) if acks else None
        return ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving=finished,
                **({"failed_recving": failed} if engine.TAKES_FAILED_LOADS else {}),
                kv_connector_worker_meta=told,
                kv_connector_stats=KvtierStats(data=stats) if stats else None,
            ),
        )

    first = aggregator.aggregate(
        [output({"a"}, {"a"}, Acks({1: Ack(1, 4)}), {"loads": 1}), output(set(), set(), None, {"loads": 1})]
    )
    assert not first.kv_connector_output.finished_recving
    assert first.kv_connector_output.kv_connector_worker_meta.acks.by_job[1].num_ranks == 1
    assert first.kv_connector_output.kv_connector_stats.data == {"loads": 2}
    second = aggregator.aggregate(
        [output(set(), set(), None, {}), output({"a"}, set(), Acks({1: Ack(1, 2)}), {})]
    )
    assert second.kv_connector_output.finished_recving == {"a"}
    if engine.TAKES_FAILED_LOADS:
        assert second.kv_connector_output.failed_recving == {"a"}


# ----------------------------------------------------------------------------------- what it gives


class Broken:
    """Whatever is touched breaks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"a bug in {name}")

    def __bool__(self) -> bool:
        return True


def test_no_exception_leaves_a_hook() -> None:
    connector = make()
    connector._scheduler = connector._worker = connector._agent = Broken()
    one: Any = Broken()
    assert connector.on_new_request(one) is None
    assert connector.get_num_new_matched_tokens(one, 0) == (0, False)
    assert connector.update_state_after_alloc(one, one, 5) is None
    assert connector.get_external_cache_hit_sources(one, 5) == {}
    assert connector.build_connector_meta(one).plan.saves == []
    assert connector.update_connector_output(one) is None
    assert connector.request_finished(one, []) == (False, None)
    assert connector.request_finished_all_groups(one, ()) == (False, None)
    assert connector.has_pending_push_work() is False
    assert connector.reset_cache() is False
    assert list(connector.take_events()) == []
    assert connector.get_transfer_results(set()).finished_recving == set()
    assert connector.build_connector_worker_meta() is None
    assert connector.start_load_kv(one) is None
    assert connector.wait_for_save() is None
    assert connector.wait_for_layer_load("layer0") is None
    assert connector.save_kv_layer("layer0", one, one) is None
    assert connector.shutdown() is None
    assert connector.get_kv_connector_stats().data["hook_errors"] > 10


def test_a_plan_that_breaks_half_way_still_ends_its_loads(ready: tuple[Any, LookupAgent, BlockPool]) -> None:
    """A load that the engine waits for is reported, whatever happens to the rest of the step."""
    connector, agent, pool = ready
    one = request(3 * BLOCK)
    connector.on_new_request(one)
    agent.asked[0].answer = LookupAnswer(2 * BLOCK, (2,))
    connector.get_num_new_matched_tokens(one, 0)
    connector.update_state_after_alloc(one, KVCacheBlocks((pool.get_new_blocks(2),)), 2 * BLOCK)
    broken = SimpleNamespace(num_scheduled_tokens={"r": 1}, kv_connector_block_state=Broken())
    meta = connector.build_connector_meta(broken)
    assert [load.request_id for load in meta.plan.loads] == ["r"]
    assert isinstance(meta.plan.loads[0], Load)


def test_stored_blocks_are_told_as_kv_events(ready: tuple[Any, LookupAgent, BlockPool]) -> None:
    connector, agent, pool = ready
    one = request(2 * BLOCK, salt="tenant")
    connector.on_new_request(one)
    table = [block.block_id for block in pool.get_new_blocks(2)]
    meta = connector.build_connector_meta(step({"r": 2 * BLOCK}, {"r": (table,)}))
    told = KvtierWorkerMetadata(Acks({meta.plan.saves[0].job: Ack(2, 2)}))
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert list(connector.take_events()) == [], "the daemon has not said where they are"
    counted = connector.get_kv_connector_stats()
    assert "hook_errors" not in counted.data
    keys = [block.key for block in agent.announced]
    assert len(keys) == 2
    connector._announcer.add(agent.announced)
    for rank in (0, 1):
        for key in keys:
            connector._announcer.place(key, rank, "CPU")
    (event,) = connector.take_events()
    assert event.block_hashes == [maybe_convert_block_hash(name) for name in one.block_hashes]
    assert event.token_ids == list(range(2 * BLOCK))
    assert (event.block_size, event.medium, event.locality) == (BLOCK, "CPU", "LOCAL")
    assert getattr(event, "ownership", None) is None, "routers drop events of an owner that they do not know"
    assert event.extra_keys == [("tenant",), None]
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
    assert event.parent_block_hash is None
    assert list(connector.take_events()) == []
    connector._announcer.place(keys[1], 1, "STORAGE")
    stored, removed = connector.take_events()
    assert (stored.medium, stored.block_hashes, stored.token_ids) == (
        "STORAGE",
        event.block_hashes[1:],
        list(range(BLOCK, 2 * BLOCK)),
    )
    assert stored.parent_block_hash == event.block_hashes[0]
    assert (removed.medium, removed.block_hashes, removed.group_idx) == ("CPU", event.block_hashes[1:], 0)
    assert getattr(removed, "ownership", None) is None
    connector.reset_cache()
    gone = {(event.medium, *event.block_hashes) for event in connector.take_events()}
    assert gone == {("CPU", event.block_hashes[0]), ("STORAGE", event.block_hashes[1])}
    assert isinstance(KVEventsConfig().enable_kv_cache_events, bool)


def test_counters_reach_prometheus() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()

    def counter(**settings: Any) -> Any:
        return Counter(registry=registry, **settings)

    kinds: Any = {Counter: counter, Gauge: Gauge, Histogram: Histogram}
    metrics = KvtierConnector.build_prom_metrics(config(), kinds, ["model_name", "engine"], {0: ["m", "0"]})
    stats = KvtierConnector.build_kv_connector_stats({"hits": 2.0})
    stats.aggregate(KvtierStats(data={"hits": 1.0, "load_seconds": 0.5}))
    assert stats.reduce() == {"hits": 3.0, "load_seconds": 0.5}
    metrics.observe(stats.data)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:kvtier_hits_total", labels) == 3.0
    assert registry.get_sample_value("vllm:kvtier_load_seconds_total", labels) == 0.5
