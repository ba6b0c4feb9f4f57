"""A small llama model as a GGUF file, from a seed: attention is sharp, each token depends on all before
it."""

from pathlib import Path
from typing import Any

VOCABULARY = 512
FIRST_TOKEN = 3  # 0, 1, 2 are begin, end and unknown


def make(
    path: Path,
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    short_tokens: int = 0,
) -> Path:
    """Write the model; its feed-forward layers are 2.75 times as wide as it is. Contexts of more than
    `short_tokens`, if given, have other rope factors than shorter ones (LongRoPE)."""
    import gguf
    import numpy as np

    words = ["<s>", "</s>", "<unk>", *(f"<x{number}>" for number in range(FIRST_TOKEN, VOCABULARY))]
    head_dim, wide = width // heads, width * 11 // 4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32_768)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([3, 3, 2] + [1] * (VOCABULARY - FIRST_TOKEN))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (random.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float16)

    ones = np.ones(width, np.float32)
    writer.add_tensor("token_embd.weight", matrix(VOCABULARY, width, width**0.5))
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", matrix(VOCABULARY, width, 2.0))
    if short_tokens:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(short_tokens)
        for name, factor in (("long", 4.0), ("short", 1.0)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.full(head_dim // 2, factor, np.float32))
    for layer in range(layers):
        shapes = {
            "attn_q": (width, width, 2.0),
            "attn_k": (kv_heads * head_dim, width, 2.0),
            "attn_v": (kv_heads * head_dim, width, 1.0),
            "attn_output": (width, width, 1.0),
            "ffn_gate": (wide, width, 1.0),
            "ffn_up": (wide, width, 1.0),
            "ffn_down": (width, wide, 1.0),
        }
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
