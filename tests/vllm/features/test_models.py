"""Kinds of models: windows, sinks, latent attention, recurrent state. Each continues prompts that it finds
at several lengths, and none takes another history's state. Windows also where they are kept at checkpoints.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector

from .. import patience
from .scene import Record, assert_found_right, connected, engine_of, unless_it_dies_alone, why_dark, words

MODELS = {name: (name, 0) for name in ("hybrid", "sinks", "mla", "mamba", "gdn")}
MODELS |= {"checkpoints of windows": ("hybrid", 256), "checkpoints beside those": ("sinks", 256)}


@pytest.fixture(scope="module")
def appliance() -> Iterator[ApplianceProcess]:
    with ApplianceProcess() as running:
        yield running


@pytest.mark.parametrize(("model", "every_tokens"), MODELS.values(), ids=MODELS.keys())
def test_a_model(
    model: str, every_tokens: int, appliance: ApplianceProcess, tmp_path: Path, record_property: Record
) -> None:
    dtype = "bfloat16" if model in ("mamba", "gdn") else "float32"  # what their kernels take
    options = connected(appliance, model=model, dtype=dtype, num_blocks=512, max_batch_tokens=512)
    extra = {**patience.CONNECTOR, "window_checkpoint_tokens": every_tokens}
    options = replace(options, connector=kvtier_connector(appliance.target, **extra))
    seed = 10 * bool(every_tokens)  # found is what this engine stored
    history = words(seed + 1, 700)
    first = {"tokens": history, "num_new": 12}
    with unless_it_dies_alone(options, tmp_path, first), engine_of(options, tmp_path) as engine:
        answer, *_ = assert_found_right(engine, appliance, first, record_property)
        turns = {"tokens": [*history, *answer.tokens, *words(seed + 2, 90)], "num_new": 12}
        longer, *_ = assert_found_right(engine, appliance, turns, record_property)
        assert longer.num_cached or why_dark(engine), "the next turn finds the one before it"
        for number, own in ((333, 3), (640, 4), (512, 5)):
            branch = {"tokens": [*history[:number], *words(seed + own, 60)], "num_new": 12}
            assert_found_right(engine, appliance, branch, record_property)
        aligned = {
            "tokens": words(seed + 6, 512),
            "num_new": 4,
        }  # its last token is computed, and onto a state only once
        assert_found_right(engine, appliance, aligned, record_property)
        other = {"tokens": [*words(seed + 7, 640), *history[640:]], "num_new": 12}
        (got,) = engine.generate(other)
        assert got.num_cached == 0
        assert got.logprobs != answer.logprobs
