"""The catalogue of models: bytes a token by hand, what a budget in GiB holds, and how names are read."""

import pytest

from kvtier.appliance.replay.models import CATALOGUE, find
from kvtier.appliance.replay.setups import ModelShape, block_slot_bytes, single_tier
from kvtier.appliance.replay.sweep import run_setup
from kvtier.appliance.replay.traces import TraceNamespace

from ..docs.tables import catalogue_markdown
from .traces import drawn, request, trace_of

#: name: bytes a token in bfloat16 and with fp8, from the configurations by hand.
BY_HAND = {
    "llama-3.1-70b": (80 * 2 * 8 * 128 * 2, 80 * 2 * 8 * 128),
    "gpt-oss-120b": (36 * 2 * 8 * 64 * 2, 36 * 2 * 8 * 64),
    "deepseek-v3": (61 * 576 * 2, 61 * 576),
    "deepseek-v3.2": (61 * (576 * 2 + 132), 61 * (656 + 132)),
    "glm-5.2": (78 * 576 * 2 + 21 * 132, 78 * 656 + 21 * 132),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_of_a_token(name: str) -> None:
    for precision, expected in zip(("", ":fp8"), BY_HAND[name], strict=True):
        geometry = ModelShape.parse(name + precision).geometry(TraceNamespace(64))
        assert geometry.block_bytes == 64 * expected


def test_every_model_has_a_shape_a_speed_and_a_row() -> None:
    table = catalogue_markdown()
    for name, model in CATALOGUE.items():
        assert model.token_bytes("fp8") < model.token_bytes()
        assert 0 <= model.windowed_share < 1
        speed = model.prefill()
        assert 100 < speed.tokens_per_s < 1e5
        assert 5_000 < speed.doubling_tokens < 1_000_000
        assert f"`{name}`" in table
        assert model.source in table


def test_a_budget_in_gib_holds_more_tokens_of_a_smaller_model() -> None:
    """A MiB is 8 tokens of Llama 3.1 8B, 14 of DeepSeek V3: so many blocks stay."""
    num_blocks = {}
    for name in ("llama-3.1-8b", "llama-3.1-8b:fp8", "deepseek-v3"):
        shape = ModelShape.parse(name)
        trace = trace_of(request(0, list(range(40))), request(1000, list(range(40))))
        outcome = run_setup(trace, single_tier("lru", "1GiB", trace, shape))
        num_blocks[name] = sum(outcome.block_hits.values())
        assert num_blocks[name] == (1 << 30) // block_slot_bytes(shape.geometry(TraceNamespace(512)))
    assert num_blocks == {"llama-3.1-8b": 16, "llama-3.1-8b:fp8": 32, "deepseek-v3": 29}


def test_names_are_read_and_wrong_ones_are_answered_with_near_ones() -> None:
    assert find("32x8x128:float16") is None
    assert ModelShape.parse("GLM-5:fp8").token_bytes == CATALOGUE["glm-5"].token_bytes("fp8")
    with pytest.raises(ValueError, match=r"llama-3\.1-70b"):
        ModelShape.parse("llama-3-70b")
    with pytest.raises(ValueError, match="bfloat16 or fp8"):
        ModelShape.parse("glm-5:int4")
    with pytest.raises(ValueError, match="LAYERSxHEADSxDIM"):
        ModelShape.parse("32y8")


def test_prefill_takes_as_long_as_its_speed_says() -> None:
    trace = trace_of(request(0, [1], 512))
    for name in ("llama-3.1-8b", "32x8x128:float16"):
        shape = ModelShape.parse(name, prefill_tokens_per_s=1024.0)
        outcome = run_setup(trace, single_tier("lru", "1GiB", trace, shape))
        assert outcome.missing_prefill_s["p50"] == outcome.prefill_s == pytest.approx(0.5, rel=0.02)


def test_prefill_of_what_is_missing_by_request_and_the_ideal_speed_up() -> None:
    trace = drawn(3)
    outcome = run_setup(trace, single_tier("lru", "50%", trace, ModelShape.parse("qwen3-8b")))
    assert outcome.missing_prefill_s["mean"] * trace.num_requests == pytest.approx(outcome.prefill_s)
    assert outcome.missing_prefill_s["p50"] < outcome.missing_prefill_s["p99"]
    assert outcome.ideal_speed_up == pytest.approx(1 / (1 - outcome.token_hit_ratio))
