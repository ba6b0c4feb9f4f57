"""What is configured, and what the connector serves nothing to: it says why, and the engine runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput

from kvtier.clients.errors import InvalidRequest
from kvtier.clients.vllm import connector as module
from kvtier.clients.vllm import engine

from .connector_scene import BLOCK, WORKER, caches, make, request


def test_a_wrong_option_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequest, match="unknown setting 'tagret'"):
        make(tagret="unix:///x")


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
