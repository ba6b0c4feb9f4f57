"""What an engine is told on its command line and is in no hash of vLLM's is in the namespace."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Llama4TextConfig, LlamaConfig, Phi3Config
from vllm.config import LoadConfig, ModelConfig
from vllm.config.multimodal import MultiModalConfig

from kvtier.clients.vllm.describe import model_of
from kvtier.clients.vllm.options import Options

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONG = {"original_max_position_embeddings": 4096, "rope_parameters": {"rope_type": "longrope", **FACTORS}}


def digest(
    kind: Any = LlamaConfig,
    max_model_len: int = 2048,
    original: int = 0,
    images: dict[str, Any] | None = None,
    variant: str = "",
) -> bytes:
    """Return the digest of an engine that serves a model of `kind`. A real ModelConfig takes a minute."""
    sizes = {**SIZES, **(LONG if kind is Phi3Config else {})}
    model = SimpleNamespace(
        model="model",
        revision=None,
        dtype=torch.float32,
        quantization=None,
        seed=0,
        hf_text_config=kind(**sizes, max_position_embeddings=65536),
        max_model_len=max_model_len,
        original_max_model_len=original or max_model_len,
        override_generation_config={},
        multimodal_config=MultiModalConfig(**images) if images else None,
    )
    config = SimpleNamespace(
        model_config=model, load_config=LoadConfig(load_format="dummy"), speculative_config=None
    )
    return model_of(config, Options(variant=variant))


@pytest.mark.parametrize(("kind", "bound"), [(Phi3Config, 4096), (Llama4TextConfig, 32768)])
def test_a_length_that_changes_all_positions_parts_engines(kind: Any, bound: int) -> None:
    at = {length: digest(kind, length) for length in (2048, bound, bound + 1, 65536)}
    assert at[2048] == at[bound] != at[bound + 1] == at[65536], "of these engines only some have the same KV"
    fitted = digest(kind, bound, original=-1)
    assert fitted not in at.values(), "shrunk after the model was made, so the length says nothing"


def test_the_engine_has_the_names_that_are_read() -> None:
    names = {field.name for field in fields(ModelConfig)}
    assert {"max_model_len", "override_generation_config", "multimodal_config"} <= names
    assert {"mm_processor_kwargs", "video_pruning_rate"} <= set(MultiModalConfig.__dataclass_fields__)


def test_the_length_of_other_models_parts_nothing() -> None:
    assert digest(max_model_len=2048) == digest(max_model_len=65536)


def test_what_no_hash_covers_parts_engines() -> None:
    differ = [
        digest(),
        digest(images={"mm_processor_kwargs": {"max_pixels": 100352}}),
        digest(images={"mm_processor_kwargs": {"max_pixels": 1003520}}),
        digest(images={"video_pruning_rate": 0.5}),
        digest(variant="patched kernel"),
    ]
    assert len(set(differ)) == len(differ)
    assert digest(images={"mm_processor_kwargs": {}}) == differ[0]
