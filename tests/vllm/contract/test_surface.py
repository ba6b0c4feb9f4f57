"""The interface, compared by name.

A hook that is new, gone or has other parameters fails a test, and somebody has to think about it before the
version joins versions.TESTED.
"""

import inspect
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm import __version__ as vllm_version
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, supports_hma
from vllm.v1.core import kv_cache_utils

from kvtier.clients.vllm import connector as module
from kvtier.clients.vllm.connector import KvtierConnector
from kvtier.clients.vllm.versions import is_tested, minor_of, misfits

from .connector_scene import SCHEDULER, caches, config, make, request

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


def test_the_installed_version_is_tested() -> None:
    assert is_tested(vllm_version)


def test_every_hook_of_this_version_is_known() -> None:
    hooks = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    ours = {name for name in vars(KvtierConnector) if not name.startswith("_")}
    assert hooks - ours == NOT_OURS
    assert ours - hooks == {"request_finished_all_groups", *NEWER}
    assert supports_hma(KvtierConnector)
    assert not inspect.isabstract(KvtierConnector)


def test_engines_whose_ids_begin_alike_have_names_of_their_own() -> None:
    """Replicas of data parallelism differ in the last letters; sessions and clients are named by engine."""
    names = set()
    for rank in (0, 1):
        chosen = config()
        chosen.kv_transfer_config.engine_id = f"prefill-on-host-1_dp{rank}"
        names.add(KVConnectorFactory.create_connector(chosen, SCHEDULER, caches())._engine)
    assert len(names) == 2


def test_hooks_take_what_the_engine_passes() -> None:
    assert misfits(KVConnectorBase_V1, KvtierConnector) == []


def test_sleep_mode_is_asked_by_its_names() -> None:
    assert {"enable_sleep_mode", "enable_cumem_allocator"} <= {field.name for field in fields(ModelConfig)}


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


def test_the_name_is_enough_where_the_package_is_installed() -> None:
    """By entry point, as `vllm serve` finds it."""
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="kvtier")
    found.load()()
    found.load()()  # loaded in every process, and sometimes twice
    assert KVConnectorFactory.get_connector_class_by_name("KvtierConnector") is KvtierConnector
