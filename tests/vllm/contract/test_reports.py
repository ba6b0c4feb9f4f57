"""What engines and their listeners hear: events of stored blocks, counters."""

from typing import Any

from vllm.config import KVEventsConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    maybe_convert_block_hash,
)
from vllm.v1.outputs import KVConnectorOutput

from kvtier.clients.vllm.connector import KvtierConnector
from kvtier.clients.vllm.messages import KvtierWorkerMetadata
from kvtier.clients.vllm.metrics import KvtierStats
from kvtier.clients.vllm.plan import Ack, Acks

from .connector_scene import BLOCK, LookupAgent, config, request, step


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
