"""Under vLLM's MultiConnector, beside others and alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput

from kvtier.clients import Geometry, NamespaceIdentity
from kvtier.clients.vllm import connector as module

from .connector_scene import BLOCK, PLAIN, LookupAgent, make, request, step


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
