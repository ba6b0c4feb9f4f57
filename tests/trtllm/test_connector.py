"""Both halves of the connector under the stand-in (stand_in.py): what is promised is right, whatever ends."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="make test-transformers")

from kvtier.clients import Client
from kvtier.clients.connector.chain_store import ChainStore
from kvtier.clients.connector.guard import Guard
from kvtier.clients.errors import InvalidRequest
from kvtier.testing import ConnectorCheck, connector_checks

from ..daemon import Daemon
from . import stand_in
from .stand_in import BLOCK_TOKENS, NUM_BLOCKS, Executor

HOMES = ["kv_cache_connector", "connectors.kv_cache_connector"]
DIGEST = "ab" * 32
PROMPT = list(range(5 * BLOCK_TOKENS + 3))


@pytest.fixture(autouse=True, params=HOMES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, imported where the interface is at either of its places."""
    stand_in.forget()
    for name, made in stand_in.modules(request.param).items():
        monkeypatch.setitem(sys.modules, name, made)
    yield importlib.import_module("kvtier.clients.trtllm")
    stand_in.forget()


def settings(monkeypatch: pytest.MonkeyPatch, target: str, more: str = "") -> None:
    monkeypatch.setenv("KVTIER_TRTLLM", f'{{"target": "{target}", "weights_digest": "{DIGEST}"{more}}}')


class Runtime:
    """An executor over a fake appliance, for the checks of the kit."""

    def __init__(self, make_client: Callable[[], Client]) -> None:
        from kvtier.clients.trtllm import rank as module

        args, guard = stand_in.arguments(""), Guard("checks")
        options = module.RankOptions(weights_digest=DIGEST)
        module._ranks[id(args)] = module.OneRank(
            args, options, guard, lambda deadline_s: ChainStore(make_client(), guard, deadline_s)
        )
        self.executor = Executor(args, importlib.import_module("kvtier.clients.trtllm"))

    def serve(self, tokens: Sequence[int], session: str) -> int:
        found = self.executor.serve(tokens)
        self.executor.settle()
        return found


@pytest.mark.parametrize("check", connector_checks(Runtime, block_tokens=BLOCK_TOKENS), ids=str)
def test_the_kits_checks(check: ConnectorCheck) -> None:
    check()


@pytest.fixture
def executor(
    module: Any, shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Executor]:
    """Make executors over a real daemon; those of one test share what they store."""

    def make(prefill_tokens: int = 1 << 30, **changes: Any) -> Executor:
        settings(monkeypatch, shared_daemon.target, f', "variant": "{request.node.name}"')
        return Executor(stand_in.arguments("", **changes), module, prefill_tokens)

    return make


def test_another_engine_finds_it_and_the_runtimes_own_cache_counts(
    executor: Callable[..., Executor],
) -> None:
    first = executor()
    assert first.serve(PROMPT) == 0
    first.settle()
    assert executor().serve(PROMPT) == 5 * BLOCK_TOKENS
    assert executor().serve(PROMPT, num_cached=2 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert executor().serve(PROMPT, num_cached=2 * BLOCK_TOKENS + 1) == 0, "a part of a block"
    assert executor().serve([*PROMPT[:20], 9, *PROMPT[21:]]) == 2 * BLOCK_TOKENS


def test_what_was_generated_is_found_by_the_next_turn(executor: Callable[..., Executor]) -> None:
    engine = executor()
    engine.serve(PROMPT, num_new=3 * BLOCK_TOKENS)
    engine.settle()
    answer = [7 * position % 1000 for position in range(len(PROMPT), len(PROMPT) + 3 * BLOCK_TOKENS)]
    whole = [*PROMPT, *answer]
    assert engine.serve([*whole, 1, 2, 3]) == (len(whole) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_aborted_request_stores_what_was_computed_and_no_more(
    executor: Callable[..., Executor], num_steps: int
) -> None:
    """Chunks of 12 tokens: what an abort leaves is one and a half blocks a step."""
    engine = executor(prefill_tokens=12)
    engine.serve(PROMPT, aborts_after=num_steps)
    engine.settle()
    found = engine.serve(PROMPT)
    assert found == min(12 * num_steps, len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_salts_and_adapters_are_kept_apart(executor: Callable[..., Executor]) -> None:
    engine = executor()
    engine.serve(PROMPT, cache_salt="anna")
    engine.settle()
    assert engine.serve(PROMPT, cache_salt="ben") == 0
    assert engine.serve(PROMPT) == 0
    assert engine.serve(PROMPT, cache_salt="anna") == 5 * BLOCK_TOKENS
    engine.settle()
    assert engine.serve(PROMPT, lora_task_id=1) == 0
    engine.settle()
    assert engine.serve(PROMPT, lora_task_id=1) == 0, "an adapter's number is not its weights"
    assert engine.serve(PROMPT, cache_salt="anna", multimodal_hashes=[[1] * 8]) == 0
    assert engine.serve(PROMPT, cache_salt="anna", py_return_context_logits=True) == 0


def test_what_is_promised_survives_the_daemon(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(tmp_path) as daemon:
        settings(monkeypatch, daemon.target)
        engine = Executor(stand_in.arguments(""), module)
        engine.serve(PROMPT)
        engine.settle()
        place = engine.scheduler.update_state_after_alloc

        def die_first(request: Any, block_ids: list[int]) -> None:
            daemon.stop(signal.SIGKILL)
            place(request, block_ids)

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "update_state_after_alloc", die_first)
            assert engine.serve(PROMPT) == 5 * BLOCK_TOKENS
        engine.settle()
        assert engine.serve(PROMPT) == 0
        engine.settle()


WINDOWS = SimpleNamespace(tokens_per_block=8, max_attention_window=[1024, 32768], host_cache_size=None)
IN_HOST = SimpleNamespace(tokens_per_block=8, max_attention_window=None, host_cache_size=1 << 30)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"speculative_config": object()}, "speculatively"),
        ({"kv_cache_config": WINDOWS}, "attention windows"),
        ({"kv_cache_config": IN_HOST}, "host_cache_size"),
    ],
)
def test_what_is_not_served_is_said_and_runs(
    executor: Callable[..., Executor], changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = executor(**changes)
    assert "kvtier serves nothing to this engine" in caplog.text
    assert words in caplog.text
    for _ in range(2):
        assert engine.serve(PROMPT) == 0


def test_blocks_of_ended_requests_come_back(executor: Callable[..., Executor]) -> None:
    engine = executor()
    for seed in range(4 * NUM_BLOCKS // 6):
        engine.serve([seed, *PROMPT])
        engine.settle()


def test_a_wrong_setting_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TRTLLM", '{"targt": "unix:///x"}')
    with pytest.raises(InvalidRequest, match="targt"):
        module.KvtierWorker(stand_in.arguments(""))
