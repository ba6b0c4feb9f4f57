"""The benchmark's switch: off, nothing of kvtier runs but what starts it and what ends what was begun."""

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from bench.vllm.overhead import turn
from bench.vllm.switch import DEFAULTS, Switch, SwitchedConnector
from kvtier.clients.vllm.connector import KvtierConnector

STARTS = {
    "register_kv_caches",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "bind_gpu_block_pool",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "requires_kv_delivery",
}
ENDS = {
    "update_connector_output",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "has_pending_push_work",
    "take_events",
    "reset_cache",
    "shutdown",
}
COST_NOTHING = {"bind_connector_metadata", "wait_for_layer_load", "save_kv_layer"}


def test_every_hook_is_switched_or_known_to_be_needed() -> None:
    hooks = {name for name in vars(KvtierConnector) if hasattr(KVConnectorBase_V1, name) and name[0] != "_"}
    assert hooks - DEFAULTS.keys() == (STARTS | ENDS | COST_NOTHING) & hooks
    newer = {"get_external_cache_hit_sources"}  # than 0.31
    assert DEFAULTS.keys() - hooks - newer == {"request_finished_all_groups"}  # SupportsHMA's


@pytest.mark.parametrize("is_on", [True, False])
def test_a_hook_runs_when_the_switch_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    path = tmp_path / "switch"
    path.write_bytes(b"\1")
    made: Any = object.__new__(SwitchedConnector)
    made.switch = Switch(path)
    made._scheduler = None  # then the hook itself promises nothing, too, but in its own words
    turn(path, is_on)
    assert made.switch.is_on == is_on
    assert made.get_num_new_matched_tokens(None, 0) == (0, False)
    if is_on:
        with pytest.raises(AttributeError):
            made.wait_for_save()  # it looks for its worker
    else:
        assert made.wait_for_save() is None
