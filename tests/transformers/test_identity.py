"""Who a model is: the same in every process, another one whenever keys or values would be others."""

from collections.abc import Callable
from typing import Any

import pytest

WHY = "torch and transformers are not installed; `make test-transformers` runs this"
torch = pytest.importorskip("torch", reason=WHY)
pytest.importorskip("transformers", reason=WHY)

from kvtier.clients.transformers.identity import fingerprint, model_digest  # noqa: E402
from kvtier.clients.transformers.probe import Unsupported  # noqa: E402

from .models import build  # noqa: E402

TINY = "llama, grouped heads"


def test_the_same_weights_are_the_same_model() -> None:
    left, right = build(TINY), build(TINY)
    assert model_digest(left) == model_digest(right)
    assert fingerprint(left) != fingerprint(right), "a fingerprint is of the memory, not of what is in it"
    right.generation_config.max_new_tokens = 5
    right.config._name_or_path = "elsewhere"
    assert model_digest(left) == model_digest(right)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one weight": lambda model: model.model.layers[3].mlp.down_proj.weight.data[5, 7:8].add_(0.25),
    "two weights swapped": lambda model: model.model.norm.weight.data[:2].copy_(torch.tensor([3.0, 4.0])),
    "rope": lambda model: model.config.rope_parameters.update(rope_theta=5e5),
    "norm": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "dtype": lambda model: model.to(torch.float16),
    "attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_keys_changes_the_digest(what: str) -> None:
    model = build(TINY)
    before = model_digest(model)
    CHANGES[what](model)
    assert model_digest(model) != before
    assert model_digest(build(TINY)) == before


def test_a_name_in_place_of_the_weights_still_counts_the_configuration() -> None:
    model = build(TINY)
    name = b"weights of the third of May"
    assert model_digest(model, name) == model_digest(build(TINY, seed=2), name)
    assert model_digest(model, name) != model_digest(model)
    model.config.rms_norm_eps = 1e-3
    assert model_digest(model, name) != model_digest(build(TINY), name)


def test_the_fingerprint_is_steady_while_nothing_happens() -> None:
    model = build(TINY)
    before = fingerprint(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert fingerprint(model) != before


def test_weights_elsewhere_are_refused_with_the_fix() -> None:
    model = build(TINY).to("meta")
    with pytest.raises(Unsupported, match="not in memory; pass weights_digest"):
        model_digest(model)
    assert len(model_digest(model, b"weights of the third of May")) == 32
