"""What is not served: models with the reason, at once; prompts as if there were no store. Never wrongly."""

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.clients.connector.guard import PLUGIN_BUG
from kvtier.testing import FakeAppliance

WHY = "torch and transformers are not installed; `make test-transformers` runs this"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

from kvtier.clients.transformers import Unsupported, probe  # noqa: E402

from .models import REFUSED, answer, build, tokens  # noqa: E402

Make = Callable[..., Any]
TINY = "llama, grouped heads"


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused_with_the_reason(name: str, make_store: Make) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        make_store(build(make))


def test_caches_of_other_kinds_are_refused(make_store: Make) -> None:
    model = build(TINY)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(Unsupported, match="wants a 'static' cache; set cache_implementation to None"):
        make_store(model)


def test_an_unknown_major_version_is_refused(make_store: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(probe, "__version__", "6.0.0")
    with pytest.raises(Unsupported, match=r"transformers is 6\.0\.0, this code speaks 4 and 5"):
        make_store(build(TINY))


def test_alignment_must_fit_the_blocks(make_store: Make) -> None:
    with pytest.raises(Unsupported, match="no multiple"):
        make_store(build(TINY), align_tokens=12)


def read(model: Any, prompt: Any, cache: Any, **more: Any) -> None:
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache, use_cache=True, **more)


@pytest.fixture
def warm(make_store: Make) -> Any:
    """A store with one prompt of 60 tokens in it."""
    model = build(TINY)
    store = make_store(model)
    cache = store.load(tokens(60))
    read(model, tokens(60), cache)
    assert cache.save().num_stored == 7
    return store


def test_padding_is_passed_by(warm: Any, appliance: FakeAppliance) -> None:
    model, prompt = warm.model, tokens(60)
    padded = torch.cat([torch.zeros_like(prompt[:, :8]), prompt], 1)
    mask = (padded != 0).long()
    expected = answer(model, padded, attention_mask=mask)
    num_calls = len(appliance.calls)
    cache = warm.load(padded, mask)
    assert (cache.reuse.num_tokens, warm.counts["passed by: padding"]) == (0, 1)
    assert torch.equal(answer(model, padded, cache, attention_mask=mask), expected)
    assert cache.save().why_not == "padding"
    assert len(appliance.calls) == num_calls


def test_padding_without_a_mask_is_seen_as_generate_sees_it(warm: Any) -> None:
    warm.model.generation_config.pad_token_id = 0
    padded = torch.cat([torch.zeros_like(tokens(8)), tokens(60)], 1)
    assert warm.load(padded).reuse.num_tokens == 0
    assert warm.counts["passed by: padding"] == 1


def test_a_padded_pass_over_a_loaded_cache_is_never_stored(warm: Any) -> None:
    prompt = torch.cat([tokens(60), tokens(30, seed=2)], 1)
    cache = warm.load(prompt)
    mask = torch.ones_like(prompt)
    mask[:, 70] = 0
    read(warm.model, prompt[:, cache.reuse.num_tokens :], cache, attention_mask=mask)
    assert cache.save().why_not == "padding"


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("positions", {"position_ids": torch.arange(60)[None] + 1}),
        ("a mask of one's own", {"attention_mask": torch.ones(1, 1, 60, 60, dtype=torch.bool).tril()}),
        ("token_type_ids", {"token_type_ids": torch.ones(1, 60, dtype=torch.long)}),
    ],
)
def test_passes_that_are_not_plain_text_in_plain_order_are_never_stored(
    why: str, more: dict[str, Any], make_store: Make
) -> None:
    model = build(TINY)
    cache = make_store(model).load(tokens(60))
    read(model, tokens(60), cache, **more)
    assert cache.save().why_not == why


def test_embeddings_in_place_of_tokens_are_never_stored(make_store: Make) -> None:
    model = build(TINY)
    cache = make_store(model).load(tokens(60))
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(tokens(60)) + 1
        model(inputs_embeds=embeddings, past_key_values=cache, use_cache=True)
    assert cache.save().why_not == "no tokens"


def test_a_past_that_the_hook_did_not_see_is_never_stored(make_store: Make) -> None:
    model = build(TINY)
    store = make_store(model)
    cache = store.load(tokens(60))
    with torch.no_grad():
        model.model(input_ids=tokens(60), past_key_values=cache, use_cache=True)  # not through the model
    assert cache.save().why_not == "nothing was read"
    answer(model, torch.cat([tokens(60), tokens(9)], 1), cache)
    assert cache.save().why_not == "not all tokens were seen"
    assert store.load(tokens(60)).reuse.num_tokens == 0


@pytest.mark.parametrize("told", ["attention_mask", "position_ids"])
def test_a_prompt_that_is_read_again_in_chunks_begins_with_nothing(told: str, warm: Any) -> None:
    """As generate of transformers 4.57 and 5.19 does, over a loaded past: that would be read twice."""
    prompt = torch.cat([tokens(60), tokens(30, seed=2)], 1)
    cache = warm.load(prompt)
    assert cache.reuse.num_tokens == 56
    for first in range(0, 90, 16):
        last = min(first + 16, 90)
        whole = {"attention_mask": torch.ones(1, last), "position_ids": torch.arange(first, last)[None]}
        read(warm.model, prompt[:, first:last], cache, **{told: whole[told]})
    computed = warm.load(tokens(2, seed=9))
    read(warm.model, prompt, computed)
    for one, other in zip(cache.layers, computed.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-5, atol=1e-5)
    assert cache.save().why_not == ""


def test_a_pass_that_failed_half_way_is_never_stored(make_store: Make) -> None:
    model = build(TINY)
    cache = make_store(model).load(tokens(60))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        read(model, tokens(60), cache)
    handle.remove()
    assert cache.save().why_not == "not all tokens were seen"


@pytest.mark.parametrize("move", ["reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_rows_that_moved_are_never_stored(move: str, make_store: Make) -> None:
    model = build(TINY)
    cache = make_store(model).load(tokens(60, num_rows=2))
    read(model, tokens(60, num_rows=2), cache)
    getattr(cache, move)(2 if move == "batch_repeat_interleave" else torch.tensor([1, 0]))
    assert cache.save().why_not == "rows were moved"


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_start_from_a_loaded_past_and_are_never_stored(more: dict[str, int], warm: Any) -> None:
    prompt = torch.cat([tokens(60), tokens(30, seed=2)], 1)
    expected = answer(warm.model, prompt, **more)
    cold = warm.load(tokens(60, seed=7))
    for cache in (warm.load(prompt), cold):
        assert torch.equal(answer(warm.model, prompt, cache, **more), expected)
        assert cache.save().why_not == "rows were moved"


def test_a_model_in_training_is_passed_by(warm: Any) -> None:
    warm.model.train()
    cache = warm.load(tokens(60))
    assert (cache.reuse.num_tokens, warm.counts["passed by: training"]) == (0, 1)
    read(warm.model, tokens(60), cache)
    assert cache.save().why_not == "training"


def test_adapters_are_passed_by(warm: Any) -> None:
    warm.model._hf_peft_config_loaded = True  # as transformers marks it
    assert warm.load(tokens(60)).reuse.num_tokens == 0
    assert warm.counts["passed by: adapter"] == 1


def test_adapters_that_peft_injects_by_itself_are_passed_by(make_store: Make) -> None:
    """Which of two is active changes no weight, so the fingerprint does not tell."""
    peft = pytest.importorskip("peft", reason="`make test-transformers` installs it")
    model = build(TINY)
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="one")
    adapted.add_adapter("two", config)
    store = make_store(model)
    for name in ("one", "two"):
        adapted.set_adapter(name)
        cache = store.load(tokens(60))
        assert cache.reuse.num_tokens == 0
        read(model, tokens(60), cache)
        assert cache.save().why_not == "adapter"
    assert store.counts["passed by: adapter"] == 2
    merged = adapted.merge_and_unload()
    assert merged is model
    cache = store.load(tokens(60))
    read(model, tokens(60), cache)
    assert cache.save().num_stored == 7, "merged it is a model of its own"


def test_a_changed_model_that_cannot_be_looked_at_is_not_taken_for_the_old_one(
    warm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory while its weights are hashed, say. It is looked at again the next time."""
    before = warm.load(tokens(60))
    with torch.no_grad():
        warm.model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    answer(warm.model, tokens(60), before)

    def fails(weights_digest: bytes = b"") -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(warm, "_learn", fails)
        assert before.save().why_not == PLUGIN_BUG
        assert warm.load(tokens(60)).reuse.num_tokens == 0
    assert warm.guard.causes == {PLUGIN_BUG: 2}
    assert before.save().why_not == "the weights have changed"
    after = warm.load(tokens(60))
    assert torch.equal(answer(warm.model, tokens(60), after), answer(warm.model, tokens(60)))
    assert after.save().why_not == ""


def test_nothing_is_saved_for_a_model_that_became_unsupported(
    warm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = warm.load(tokens(60))

    def refuses(weights_digest: bytes = b"") -> None:
        raise Unsupported("its RoPE scaling is dynamic now")

    with torch.no_grad():
        warm.model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    monkeypatch.setattr(warm, "_learn", refuses)
    answer(warm.model, tokens(60), before)
    assert "dynamic" in before.save().why_not
    assert warm.load(tokens(60)).reuse.num_tokens == 0


def test_weights_that_change_are_another_model(warm: Any) -> None:
    before = warm.load(tokens(60))
    assert before.reuse.num_tokens == 56
    with torch.no_grad():
        warm.model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    answer(warm.model, tokens(60), before)
    assert before.save().why_not == "the weights have changed"
    after = warm.load(tokens(60))
    assert (after.reuse.num_tokens, warm.counts["model changed"]) == (0, 1)
    assert torch.equal(answer(warm.model, tokens(60), after), answer(warm.model, tokens(60)))
    assert after.save().why_not == ""
    assert warm.load(tokens(60)).reuse.num_tokens == 56


def test_a_model_that_is_cast_is_another_model(warm: Any) -> None:
    warm.model.to(torch.bfloat16)
    cache = warm.load(tokens(60))
    assert cache.reuse.num_tokens == 0
    answer(warm.model, tokens(60), cache)
    assert cache.save().num_stored == 8
    assert warm.load(tokens(60)).layers[0].keys.dtype == torch.bfloat16


def test_a_model_that_became_unservable_is_passed_by(warm: Any) -> None:
    warm.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    cache = warm.load(tokens(60))
    assert cache.reuse.num_tokens == 0
    assert any("RoPE scaling" in event for event in warm.counts)
