"""Models: bytes of KV a token and FLOPs of prefill of well-known models, from their published configurations.

A layer keeps, per token:

    GQA         2 x KV heads x head dimension values
    MLA         one latent and one rotary key, 512 + 64 values, whatever the number of heads
    indexer     beside MLA, the keys by which sparse attention selects: 128 fp8 values and a float32 scale

Values are bfloat16, or a byte each with `:fp8`. Sparse MLA is packed then: 512 fp8 values, four float32
scales and a rotary key in bfloat16 are 656 bytes (`fp8_ds_mla` in vLLM); the indexer's 132 bytes are the same
in either. A sliding window is counted for every token: a store that can continue at any block holds the
window's layers of every block. Layers of draft models are not counted.

Models with recurrent layers (Mamba, gated delta nets) are not listed: their state belongs to a position, not
to a token. Shapes are from each model's config.json, active parameters from its card, both at
huggingface.co/SOURCE.
"""

import difflib
from typing import NamedTuple

from ...policies.costs import DEFAULT_FLOP_PER_S, PrefillModel

BF16_BYTES, FP8_BYTES = 2, 1
PRECISIONS = {"bfloat16": BF16_BYTES, "fp8": FP8_BYTES}
LATENT_VALUES, ROTARY_VALUES = 512, 64
PACKED_LATENT_BYTES = LATENT_VALUES * FP8_BYTES + 4 * 4 + ROTARY_VALUES * BF16_BYTES
INDEX_VALUES, INDEX_BYTES = 128, 128 * FP8_BYTES + 4


class AttentionLayers(NamedTuple):
    """Layers of one kind of attention."""

    num_layers: int
    kv_values: int  # per token and layer
    context_flop: int  # of prefill, per token, layer and token of context
    window_tokens: int = 0  # 0: all of the context
    num_index_layers: int = 0  # that keep keys of an indexer, too
    is_latent: bool = False

    def token_bytes(self, value_bytes: int) -> int:
        """Return the bytes of KV a token, of all these layers."""
        is_packed = self.num_index_layers and value_bytes == FP8_BYTES
        layer_bytes = PACKED_LATENT_BYTES if is_packed else self.kv_values * value_bytes
        return self.num_layers * layer_bytes + self.num_index_layers * INDEX_BYTES


def grouped(
    num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, window_tokens: int = 0
) -> AttentionLayers:
    """Return layers of grouped-query attention."""
    flop = 0 if window_tokens else 4 * num_heads * head_dim
    return AttentionLayers(num_layers, 2 * num_kv_heads * head_dim, flop, window_tokens)


def latent(
    num_layers: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    index_heads: int = 0,
    num_index_layers: int = 0,
) -> AttentionLayers:
    """Return layers of multi-head latent attention; with an indexer, that reads the context."""
    flop = 2 * num_heads * (key_dim + value_dim)
    if index_heads:
        flop = 2 * index_heads * INDEX_VALUES * num_index_layers // num_layers
    values = LATENT_VALUES + ROTARY_VALUES
    return AttentionLayers(num_layers, values, flop, 0, num_index_layers, is_latent=True)


class CataloguedModel(NamedTuple):
    """A model with a published shape."""

    source: str  # repository of its config.json
    active_parameters: float  # weights that a token passes
    layers: tuple[AttentionLayers, ...]

    @property
    def num_layers(self) -> int:
        """Return the number of layers that keep KV."""
        return sum(part.num_layers for part in self.layers)

    def token_bytes(self, precision: str = "bfloat16") -> int:
        """Return the bytes of KV a token. Raises KeyError for an unknown precision."""
        return sum(part.token_bytes(PRECISIONS[precision]) for part in self.layers)

    @property
    def windowed_share(self) -> float:
        """Return the share of the bytes that only a sliding window ever reads."""
        windowed = sum(part.token_bytes(BF16_BYTES) for part in self.layers if part.window_tokens)
        return windowed / self.token_bytes()

    @property
    def attention(self) -> str:
        """Return the kind of attention in words."""
        whole = self.layers[0]
        words = ["MLA" if whole.is_latent else "GQA"]
        if whole.num_index_layers:
            words.append(f"indexer in {whole.num_index_layers} of {self.num_layers} layers")
        words += [
            f"window of {part.window_tokens:,} in {part.num_layers} of {self.num_layers} layers"
            for part in self.layers
            if part.window_tokens
        ]
        return ", ".join(words)

    def prefill(self, tokens_per_s: float = 0.0) -> PrefillModel:
        """Return the speed of prefill; `tokens_per_s` 0: of one accelerator of DEFAULT_FLOP_PER_S."""
        token_flop = 2.0 * self.active_parameters
        context_flop = sum(part.num_layers * part.context_flop for part in self.layers)
        return PrefillModel(tokens_per_s or DEFAULT_FLOP_PER_S / token_flop, token_flop / context_flop)


CATALOGUE: dict[str, CataloguedModel] = {
    "llama-3.1-8b": CataloguedModel("meta-llama/Llama-3.1-8B", 8.0e9, (grouped(32, 32, 8, 128),)),
    "llama-3.1-70b": CataloguedModel("meta-llama/Llama-3.1-70B", 70.6e9, (grouped(80, 64, 8, 128),)),
    "llama-3.3-70b": CataloguedModel("meta-llama/Llama-3.3-70B-Instruct", 70.6e9, (grouped(80, 64, 8, 128),)),
    "llama-3.1-405b": CataloguedModel("meta-llama/Llama-3.1-405B", 405.9e9, (grouped(126, 128, 8, 128),)),
    "qwen2.5-7b": CataloguedModel("Qwen/Qwen2.5-7B-Instruct", 7.6e9, (grouped(28, 28, 4, 128),)),
    "qwen2.5-72b": CataloguedModel("Qwen/Qwen2.5-72B-Instruct", 72.7e9, (grouped(80, 64, 8, 128),)),
    "qwen3-8b": CataloguedModel("Qwen/Qwen3-8B", 8.2e9, (grouped(36, 32, 8, 128),)),
    "qwen3-14b": CataloguedModel("Qwen/Qwen3-14B", 14.8e9, (grouped(40, 40, 8, 128),)),
    "qwen3-32b": CataloguedModel("Qwen/Qwen3-32B", 32.8e9, (grouped(64, 64, 8, 128),)),
    "qwen3-30b-a3b": CataloguedModel("Qwen/Qwen3-30B-A3B", 3.3e9, (grouped(48, 32, 4, 128),)),
    "qwen3-235b-a22b": CataloguedModel("Qwen/Qwen3-235B-A22B", 22e9, (grouped(94, 64, 4, 128),)),
    "minimax-m2": CataloguedModel("MiniMaxAI/MiniMax-M2", 10e9, (grouped(62, 48, 8, 128),)),
    "gpt-oss-20b": CataloguedModel(
        "openai/gpt-oss-20b", 3.6e9, (grouped(12, 64, 8, 64), grouped(12, 64, 8, 64, 128))
    ),
    "gpt-oss-120b": CataloguedModel(
        "openai/gpt-oss-120b", 5.1e9, (grouped(18, 64, 8, 64), grouped(18, 64, 8, 64, 128))
    ),
    "gemma-3-27b": CataloguedModel(
        "google/gemma-3-27b-it", 27e9, (grouped(10, 32, 16, 128), grouped(52, 32, 16, 128, 1024))
    ),
    "command-a-03-2025": CataloguedModel(
        "CohereLabs/c4ai-command-a-03-2025", 111e9, (grouped(16, 96, 8, 128), grouped(48, 96, 8, 128, 4096))
    ),
    "deepseek-v3": CataloguedModel("deepseek-ai/DeepSeek-V3", 37e9, (latent(61, 128, 192, 128),)),
    "deepseek-r1": CataloguedModel("deepseek-ai/DeepSeek-R1", 37e9, (latent(61, 128, 192, 128),)),
    "deepseek-v3.2": CataloguedModel("deepseek-ai/DeepSeek-V3.2", 37e9, (latent(61, 128, 192, 128, 64, 61),)),
    "kimi-k2.5": CataloguedModel("moonshotai/Kimi-K2.5", 32e9, (latent(61, 64, 192, 128),)),
    "glm-5": CataloguedModel("zai-org/GLM-5", 40e9, (latent(78, 64, 256, 256, 32, 78),)),
    "glm-5.2": CataloguedModel("zai-org/GLM-5.2", 40e9, (latent(78, 64, 256, 256, 32, 21),)),
}


def find(text: str) -> tuple[CataloguedModel, str] | None:
    """Return the model and precision that `NAME[:fp8]` means; None when it is no name but a shape.

    Raises ValueError for a name or a precision that is not known."""
    name, _, precision = text.lower().partition(":")
    if name in CATALOGUE:
        if precision and precision not in PRECISIONS:
            raise ValueError(f"{text!r}: KV of {name} is bfloat16 or fp8, e.g. {name}:fp8")
        return CATALOGUE[name], precision or "bfloat16"
    if name[:1].isdigit():
        return None
    near = difflib.get_close_matches(name, CATALOGUE, 3, 0.5) or list(CATALOGUE)
    raise ValueError(
        f"no model {text!r} in the catalogue; perhaps {', '.join(near)}? "
        "Write LAYERSxHEADSxDIM[:DTYPE] for others"
    )
