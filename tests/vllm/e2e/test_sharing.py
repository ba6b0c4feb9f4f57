"""Engines on one host share what each of them computed, and what is common is kept once."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.process import EngineProcess
from kvtier.clients import Client
from kvtier.clients.vllm import names as names_of
from kvtier.clients.vllm.names import block_names

from .. import patience
from .comparison import difference, exact_difference
from .rig import FULL, SEED, SMALL, settled
from .traffic import Traffic

NUM_SHARED_BLOCKS = 16
NUM_AGENTS = 10_000 if FULL else 600
NUM_TOGETHER = 200


@pytest.fixture(scope="module")
def appliance() -> Iterator[ApplianceProcess]:
    with ApplianceProcess() as running:
        yield running


@pytest.fixture(scope="module")
def engines(
    appliance: ApplianceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    folder = tmp_path_factory.mktemp("sharing")
    connector = kvtier_connector(appliance.target, **patience.CONNECTOR)
    options = replace(SMALL, max_requests=32, connector=connector)
    with EngineProcess(options, folder, "first") as first, EngineProcess(options, folder, "second") as second:
        yield first.ready(), second.ready()


def test_the_second_engine_reuses_what_the_first_computed(
    appliance: ApplianceProcess, engines: tuple[EngineProcess, EngineProcess]
) -> None:
    first, second = engines
    traffic = Traffic(SEED, SMALL.block_tokens, max_tokens=900, may_align=False)
    num_blocks = appliance.num_blocks()
    for _ in range(12):
        turn = traffic.turn()
        first.generate(turn.request)
        settled(first, appliance)
        first.generate(turn.request)  # from the appliance
        (own,) = first.generate(turn.request)  # a hit in the engine's own cache
        (other,) = second.generate(turn.request)
        second.reset()
        assert other.num_cached == own.num_cached
        assert not exact_difference(own, other)
        traffic.answered(turn, own.tokens)
    assert appliance.num_blocks() > num_blocks


@pytest.mark.parametrize("by", ["field", "parameter"])
def test_what_kv_hints_say_of_tokens_reaches_the_blocks(
    appliance: ApplianceProcess, engines: tuple[EngineProcess, EngineProcess], by: str
) -> None:
    if by == "field":
        pytest.importorskip("vllm.v1.kv_hints", reason="this vLLM has no kv_hints: the parameter is for it")
    first, second = engines
    payload = {"directives": [{"start": 0, "end": 4 * SMALL.block_tokens, "priority": 90, "duration": 60.0}]}
    action = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0", "payload": payload}
    hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    traffic = Traffic(SEED + 2, SMALL.block_tokens, max_tokens=900)
    ask = {"tokens": traffic.words(9 * SMALL.block_tokens), "num_new": 2}
    hinted = {**ask, "hints": hints} if by == "field" else {**ask, "transfer": {"kvtier_hints": hints}}
    before = appliance.status().counters["blocks_with_retention"]
    (computed,) = first.generate(hinted)
    settled(first, appliance)
    saved = appliance.status().counters["blocks_with_retention"]
    assert saved > before, "with what is saved"
    second.reset()
    (loaded,) = second.generate(hinted)
    assert loaded.num_cached > 0
    assert loaded.tokens == computed.tokens
    assert appliance.status().counters["blocks_with_retention"] > saved, "with what is found"


def test_what_a_router_announces_by_its_tokens_comes_up_before_it_is_asked_for(
    appliance: ApplianceProcess, engines: tuple[EngineProcess, EngineProcess]
) -> None:
    first, second = engines
    tokens = Traffic(SEED + 3, SMALL.block_tokens, max_tokens=900).words(9 * SMALL.block_tokens + 1)
    (computed,) = first.generate({"tokens": tokens, "num_new": 2})
    settled(first, appliance)
    appliance.leave_dram()
    with Client(appliance.target) as router:
        names = block_names(tokens, SMALL.block_tokens, seed=os.environ.get("PYTHONHASHSEED", names_of.SEED))
        announced = router.prefetch(None, names)
        assert announced.num_blocks == announced.num_promoted == 9
    (found,) = second.generate({"tokens": tokens, "num_new": 2})
    assert found.num_cached == 9 * SMALL.block_tokens
    assert not difference(computed, found)
    counters = appliance.status().counters
    assert counters["prefetch_used"] + counters["prefetch_late"] == 9, "late: asked for on its way"


def test_a_shared_system_prompt_is_kept_once(
    appliance: ApplianceProcess, engines: tuple[EngineProcess, EngineProcess]
) -> None:
    """Both engines serve agents that begin with the same words and go on with a few of their own."""
    traffic = Traffic(SEED + 1, SMALL.block_tokens, max_tokens=2000)
    system = traffic.words(NUM_SHARED_BLOCKS * SMALL.block_tokens)
    before = appliance.num_blocks()
    num_cached = 0
    for start in range(0, NUM_AGENTS, NUM_TOGETHER):
        engine = engines[start // NUM_TOGETHER % 2]
        asks = [
            {"tokens": system + traffic.words(20), "num_new": 2, "logprobs": False}
            for _ in range(min(NUM_TOGETHER, NUM_AGENTS - start))
        ]
        engine.reset()
        num_cached += sum(output.num_cached for output in engine.generate(*asks))
    for engine in engines:
        settled(engine, appliance)
    assert appliance.num_blocks() - before == NUM_SHARED_BLOCKS
    share = num_cached / NUM_AGENTS
    print(f"\n{NUM_AGENTS} requests, on average {share:.0f} of {len(system) + 20} tokens cached")
    assert num_cached > NUM_AGENTS * len(system) * 0.9
