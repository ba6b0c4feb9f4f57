"""Requests, loads and saves through the hooks of an engine's steps."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvtier.clients import Tier
from kvtier.clients.vllm import engine
from kvtier.clients.vllm.messages import KvtierMetadata, KvtierWorkerMetadata
from kvtier.clients.vllm.metrics import KvtierStats
from kvtier.clients.vllm.plan import Ack, Acks, Load
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer

from .connector_scene import BLOCK, WORKER, Broken, LookupAgent, make, request, step


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
