"""Makes the models that the engine runs: real architectures, random weights, from a seed, without a download.

Random weights of the usual small spread would make a model that hardly looks at its context, and a test
that compares its outputs could not tell right KV from wrong. So every matrix gets the spread that keeps
activations at unit size, and the projections to Q and K twice that: attention is sharp, each token depends
on all before it. Downloading a small real model was rejected: tests need no network, and the same bits
everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

from bench.machine import ROOT

FOLDER = Path(os.environ.get("KVTIER_VLLM_MODELS", ROOT / ".cache" / "vllm-models"))
VOCABULARY = 512
FIRST_TOKEN = 3  # 0, 1, 2 are begin, end and padding
MAX_TOKENS = 32_768

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_LLAMA = {**_COMMON, "rope_theta": 500_000.0}
_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # 4 layers, 2 KiB of KV per token in bfloat16: an answer in milliseconds
    "tiny": (
        "LlamaConfig",
        {
            **_LLAMA,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
    # 12 layers, 143 M parameters, 24 KiB of KV per token: prefill costs seconds, as it does elsewhere
    "mid": (
        "LlamaConfig",
        {
            **_LLAMA,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    # sliding-window and full attention in turns: more than one KV cache group
    "hybrid": (
        "Gemma3TextConfig",
        {
            **_COMMON,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    # Mamba-2 layers and full attention
    "mamba": (
        "GraniteMoeHybridConfig",
        {
            **_COMMON,
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.125,
            "shared_intermediate_size": 704,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
    # gated delta rule and full attention
    "gdn": (
        "Qwen3NextConfig",
        {
            **_COMMON,
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "mlp_only_layers": [0, 1, 2],
        },
    ),
    # latent attention: one head of KV for all
    "mla": (
        "DeepseekV2Config",
        {
            **_COMMON,
            "hidden_size": 256,
            "intermediate_size": 704,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 4,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
    # sliding windows with attention sinks, and full attention
    "sinks": (
        "GptOssConfig",
        {
            **_COMMON,
            **_SMALL,
            "num_hidden_layers": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    # 8 layers, 16 KiB of KV per token; 9,500 words of one token each, which LMCache's workloads draw from
    "words": (
        "LlamaConfig",
        {
            **_LLAMA,
            "vocab_size": 9728,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
}


def path_of(name: str) -> Path:
    """Return the folder of a model. Raises FileNotFoundError with the command that makes it."""
    folder = FOLDER / name
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is not there: run `python -m bench.vllm.models {name}`")
    return folder


def make(name: str, seed: int = 0) -> Path:
    """Write the model and its tokenizer (one token per byte) as a Hugging Face folder of bfloat16 weights."""
    import torch
    import transformers

    config_class, values = MODELS[name]
    config = getattr(transformers, config_class)(**values, dtype="bfloat16")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=_spread(label, weight.shape[1]))
    folder = FOLDER / name
    model.save_pretrained(folder)
    (_tokenizer_of_words() if name == "words" else _tokenizer()).save_pretrained(folder)
    return folder


def _spread(label: str, num_inputs: int) -> float:
    if "embed_tokens" in label:
        return 1.0
    if "lm_head" in label:
        return 0.1
    gain = 2.0 if "q_proj" in label or "k_proj" in label else 1.0
    return float(gain / num_inputs**0.5)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<x{number}>" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=MAX_TOKENS,
    )


def _tokenizer_of_words() -> Any:
    """Return one that knows made-up words, and what LMCache's prompts say beside such; with a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    said = "Session [Session history] You are a helpful assistant. help hi tell Hello x"
    words = [*said.split(), *map(str, range(100)), *(f"{number}." for number in range(100))]
    first, second = "bdfgklmnprstvz", "aeiou"
    words += map("".join, itertools.islice(itertools.product(first, second, first, second, "nrst"), 9500))
    known = ["<s>", "</s>", "<pad>", "<unk>", *(f"▁{word}" for word in words)]
    vocabulary = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
    )
    fast.chat_template = "{% for message in messages %} {{ message['content'] }}{% endfor %}"
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    usual = [name for name in MODELS if name != "words"]
    parser.add_argument("names", nargs="*", default=usual, metavar="NAME", help=", ".join(MODELS))
    for name in parser.parse_args().names:
        print(make(name))


if __name__ == "__main__":
    main()
