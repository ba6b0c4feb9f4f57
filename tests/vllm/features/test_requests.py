"""What requests can ask of one engine: adapters, embeddings, grammars, several answers, priorities; and what
is done to it while it runs: new weights, a pause."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.vllm import models
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.process import EngineDied, EngineProcess

from ..e2e.comparison import difference
from ..e2e.rig import settled
from .scene import Record, assert_found_right, connected, engine_of, words

WIDTH = 256  # of the model's embeddings
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
MORE = {**LORA, "enable_prompt_embeds": True, "scheduling_policy": "priority", "max_logprobs": 8}


@pytest.fixture(scope="module")
def appliance() -> Iterator[ApplianceProcess]:
    with ApplianceProcess() as running:
        yield running


@pytest.fixture(scope="module")
def engine(appliance: ApplianceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_of(connected(appliance, more=MORE), tmp_path_factory.mktemp("requests")) as running:
        yield running


def adapter(folder: Path, seed: int) -> str:
    """Write a LoRA adapter of random weights; return its folder."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    config = json.loads((models.path_of("tiny") / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for part, width in (("q_proj", WIDTH), ("v_proj", WIDTH // 2)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, WIDTH, generator=generator) / 16
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, 8, generator=generator) / 3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    wanted = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps({**wanted, "bias": "none"}))
    return str(folder)


def test_adapters_that_take_turns(
    engine: EngineProcess, appliance: ApplianceProcess, tmp_path: Path, record_property: Record
) -> None:
    """One place for adapters, two adapters and none, in turns: each finds its own KV only."""
    prompt = words(1, 200)
    loras: list[Any] = [
        {"name": f"l{n}", "id": n, "path": adapter(tmp_path / f"lora-{n}", n)} for n in (1, 2)
    ]
    answers = []
    for lora in (*loras, None):
        ask = {"tokens": prompt, "num_new": 8, **({"lora": lora} if lora else {})}
        computed, *_ = assert_found_right(engine, appliance, ask, record_property)
        assert computed.num_cached == 0, "another adapter's KV was found"
        answers.append(computed.tokens)
    assert len(set(answers)) == 3, "the adapters change what is answered"


def test_prompt_embeddings(
    engine: EngineProcess, appliance: ApplianceProcess, record_property: Record
) -> None:
    asks = [
        {"embeds": {"seed": seed, "num": 200, "width": WIDTH}, "num_new": 8, "logprobs": False}
        for seed in (1, 2)
    ]
    first, *_ = assert_found_right(engine, appliance, asks[0], record_property)
    (other,) = engine.generate(asks[1])
    assert other.num_cached == 0
    assert other.tokens != first.tokens


def test_structured_output(
    engine: EngineProcess, appliance: ApplianceProcess, record_property: Record
) -> None:
    ask = {"tokens": words(3, 200), "num_new": 12, "regex": "[a-f]{4}[0-9]{4}"}
    computed, *_ = assert_found_right(engine, appliance, ask, record_property)
    (free,) = engine.generate({"tokens": words(3, 200), "num_new": 12})
    assert free.tokens != computed.tokens


def test_several_answers(engine: EngineProcess, appliance: ApplianceProcess, record_property: Record) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 7}
    ask = {"tokens": words(4, 200), "num_new": 8, "sampling": sampling, "logprobs": False}
    computed, *_ = assert_found_right(engine, appliance, ask, record_property)
    assert len({computed.tokens, *map(tuple, computed.others)}) == 3


def test_beams(engine: EngineProcess, appliance: ApplianceProcess, record_property: Record) -> None:
    """A beam is a request for each token: its prompt and what it has so far."""
    ask: dict[str, Any] = {"tokens": words(7, 201), "width": 3, "num_new": 40}

    def beams() -> list[list[int]]:
        found: list[list[int]] = engine.call("beam_search", **ask)["beams"]
        return found

    computed, own = beams(), beams()
    settled(engine, appliance)
    before = engine.metrics().get("vllm:external_prefix_cache_hits", 0)
    loaded = beams()
    assert engine.metrics()["vllm:external_prefix_cache_hits"] - before >= 192, "the prompt's blocks"
    assert loaded == own
    assert len({tuple(beam) for beam in computed}) == 3


def test_priorities(engine: EngineProcess, appliance: ApplianceProcess, record_property: Record) -> None:
    asks = [{"tokens": words(10 + n, 150), "num_new": 6, "priority": -n} for n in range(24)]
    expected = engine.generate(*asks)
    settled(engine, appliance)
    got = engine.generate(*asks)
    assert all(output.num_cached for output in got)
    assert not [problem for pair in zip(expected, got, strict=True) if (problem := difference(*pair))]


def test_pause_and_wake(engine: EngineProcess, appliance: ApplianceProcess, record_property: Record) -> None:
    """What sleep mode does without giving memory back: level 0."""
    ask = {"tokens": words(5, 200), "num_new": 8}
    expected, *_ = assert_found_right(engine, appliance, ask, record_property)
    try:
        engine.call("invoke", name="sleep", level=0)
    except EngineDied as problem:
        pytest.skip(f"this build of the engine cannot: {str(problem).splitlines()[0][:160]}")
    engine.call("invoke", name="wake_up")
    engine.reset()
    (got,) = engine.generate(ask)
    assert not difference(expected, got)
    assert got.num_cached > 0


def test_weights_that_are_loaded_anew(
    engine: EngineProcess, appliance: ApplianceProcess, record_property: Record
) -> None:
    """After new weights nothing stored before is found, and what is computed with them is."""
    ask = {"tokens": words(6, 200), "num_new": 8}
    expected, *_ = assert_found_right(engine, appliance, ask, record_property)
    engine.call("invoke", name="collective_rpc", method="reload_weights")
    engine.call("invoke", name="reset_prefix_cache", reset_connector=True)
    (got,) = engine.generate(ask)
    assert got.num_cached == 0
    assert not difference(expected, got)
    settled(engine, appliance)
    (again,) = engine.generate(ask)
    assert again.num_cached > 0
    assert not difference(expected, again)
