"""Engines of other shapes: drafts, ranks, block and chunk sizes that differ, mixtures of connectors, fp8."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.vllm import models
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.process import EngineDied, EngineProcess

from ..e2e.comparison import difference
from ..e2e.rig import SMALL, settled
from .scene import (
    Record,
    assert_found_right,
    connected,
    engine_of,
    unless_it_dies_alone,
    words,
    words_of,
)

DEPLOYED = replace(SMALL, in_one_process=False)
DRAFTS: dict[str, dict[str, Any]] = {
    "by words of the prompt": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "by a draft model": {"method": "draft_model", "model": "tiny"},
}
RANKS = {
    "tensor parallel 2": replace(DEPLOYED, num_workers=2),
    "tensor parallel 4": replace(DEPLOYED, model="mid", num_workers=4, max_model_tokens=1024),
    "pipeline parallel 2": replace(DEPLOYED, more={"pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
def test_speculative(draft: dict[str, Any], tmp_path: Path, record_property: Record) -> None:
    settings = {**draft, "num_speculative_tokens": 3}
    if "model" in draft:
        settings["model"] = str(models.path_of(draft["model"]))
    phrase = words(1, 40)
    asks = [{"tokens": phrase * 5 + words(num_new, 7), "num_new": num_new} for num_new in (8, 48)]
    options = replace(SMALL, more={"speculative_config": settings})
    with (
        ApplianceProcess() as appliance,
        unless_it_dies_alone(options, tmp_path, asks[1]),
        engine_of(connected(appliance, options), tmp_path) as engine,
    ):
        for ask in asks:
            assert_found_right(engine, appliance, ask, record_property, is_exact=False)


@pytest.mark.parametrize("options", RANKS.values(), ids=RANKS.keys())
def test_ranks(options: Any, tmp_path: Path, record_property: Record) -> None:
    asks = [{"tokens": words(1, number), "num_new": 8} for number in (150, 400)]
    with (
        ApplianceProcess() as appliance,
        unless_it_dies_alone(options, tmp_path, asks[0]),
        engine_of(connected(appliance, options), tmp_path) as engine,
    ):
        for ask in asks:
            assert_found_right(engine, appliance, ask, record_property)
        appliance.check_integrity()


def test_block_sizes(tmp_path: Path, record_property: Record) -> None:
    """Engines with blocks of 32 and of 128 tokens: each finds its own, none the other's.

    Not 16: vLLM's build for the CPU takes multiples of 32."""
    ask = {"tokens": words(1, 400), "num_new": 8}
    with ApplianceProcess() as appliance:
        answers = []
        for size in (32, 128):
            options = connected(appliance, block_tokens=size, num_blocks=16384 // size)
            with engine_of(options, tmp_path, f"of-{size}") as engine:
                computed, *_ = assert_found_right(engine, appliance, ask, record_property)
                assert computed.num_cached == 0
                answers.append(computed)
        assert not difference(*answers)


def test_chunk_sizes(tmp_path: Path, record_property: Record) -> None:
    """What an engine stored that computes 2,048 tokens a step is found by one that computes 96, and back."""
    asks = [{"tokens": words(seed, 400), "num_new": 8} for seed in (1, 2)]
    with ApplianceProcess() as appliance:
        large = connected(appliance)
        with (
            engine_of(large, tmp_path, "large") as first,
            engine_of(replace(large, max_batch_tokens=96), tmp_path, "small") as second,
        ):
            for one, other, ask in ((first, second, asks[0]), (second, first, asks[1])):
                computed, *_ = assert_found_right(one, appliance, ask, record_property)
                (got,) = other.generate(ask)
                assert got.num_cached > 0
                assert not difference(computed, got)


def test_a_mixture_of_connectors(tmp_path: Path, record_property: Record) -> None:
    """vLLM's MultiConnector with kvtier before vLLM's own example."""
    with ApplianceProcess() as appliance:
        options = connected(appliance)
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
        }
        mixture = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [options.connector, example]},
        }
        ask = {"tokens": words(1, 300), "num_new": 8}
        with (
            unless_it_dies_alone(options, tmp_path, ask, others=example),
            engine_of(replace(options, connector=mixture), tmp_path) as engine,
        ):
            assert_found_right(engine, appliance, ask, record_property)
            assert engine.metrics().get("vllm:external_prefix_cache_hits", 0) > 0


def test_fp8(tmp_path: Path, record_property: Record) -> None:
    with ApplianceProcess() as appliance:
        options = connected(appliance, dtype="bfloat16", more={"kv_cache_dtype": "fp8"})
        with EngineProcess(options, tmp_path) as engine:
            try:
                engine.ready()
            except EngineDied:
                assert "fp8" in words_of(engine).lower(), words_of(engine)
                pytest.skip(f"this build of the engine cannot: {words_of(engine)}")
            ask = {"tokens": words(1, 300), "num_new": 8, "logprobs": False}
            (computed,) = engine.generate(ask)
            settled(engine, appliance)
            (loaded,) = engine.generate(ask)
            (own,) = engine.generate(ask)
            assert loaded.num_cached > 0
            assert loaded.tokens == own.tokens
            assert len(computed.tokens) == 8
