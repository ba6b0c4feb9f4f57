"""Small models with random weights, one per way of keeping a past. Imported only where torch is."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

SEED = 11
VOCABULARY_SIZE = 97
FIRST_TOKEN = 3  # below it are tokens that models treat specially
WINDOW = 24
COMMON = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def _of(config: Any, model: Any, **more: Any) -> Callable[..., Any]:
    return lambda **special: model(config(**{**COMMON, **more, **special}))


SERVED: dict[str, Callable[..., Any]] = {
    "llama, grouped heads": _of(hf.LlamaConfig, hf.LlamaForCausalLM),
    "llama, one head each": _of(hf.LlamaConfig, hf.LlamaForCausalLM, num_key_value_heads=4),
    "qwen3": _of(hf.Qwen3Config, hf.Qwen3ForCausalLM, head_dim=16),
    "gpt2, learned positions": lambda **special: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY_SIZE,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=512,
            bos_token_id=None,
            eos_token_id=None,
            **special,
        )
    ),
    "gpt-neox, partly rotated": _of(hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM),
    "falcon, one head for all, alibi": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            multi_query=True,
            alibi=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
    "mixtral, experts": _of(hf.MixtralConfig, hf.MixtralForCausalLM, num_local_experts=4),
    "deepseek-v3, joint latent": _of(
        hf.DeepseekV3Config,
        hf.DeepseekV3ForCausalLM,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "mistral, all layers sliding": _of(hf.MistralConfig, hf.MistralForCausalLM, sliding_window=WINDOW),
    "gemma-3, some layers sliding": _of(
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        head_dim=16,
        sliding_window=WINDOW,
        num_hidden_layers=6,
        num_key_value_heads=1,
        layer_types=MIXED,
    ),
    "gpt-oss, sinks": _of(
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "llama-4, chunks": _of(
        hf.Llama4TextConfig,
        hf.Llama4ForCausalLM,
        head_dim=16,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        intermediate_size_mlp=96,
    ),
    "gemma-3n, layers that use another's past": _of(
        hf.Gemma3nTextConfig,
        hf.Gemma3nForCausalLM,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=MIXED,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY_SIZE,
        hidden_size_per_layer_input=8,
        activation_sparsity_pattern=[0.0] * 6,
        altup_num_inputs=2,
        laurel_rank=8,
    ),
}
# In the last words transformers 4, where such models have caches of their own.
NO_LAYER = "LinearAttentionLayer|did not keep the token|does not run over a DynamicCache"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "mamba": (_of(hf.MambaConfig, hf.MambaForCausalLM), NO_LAYER),
    "qwen3-next, some layers linear": (
        _of(
            hf.Qwen3NextConfig, hf.Qwen3NextForCausalLM, head_dim=16, linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        ),
        NO_LAYER,
    ),
    "lfm2, some layers convolutions": (
        _of(hf.Lfm2Config, hf.Lfm2ForCausalLM, layer_types=["conv", "full_attention"] * 2),
        NO_LAYER,
    ),
    "rwkv": (
        lambda: hf.RwkvForCausalLM(
            hf.RwkvConfig(vocab_size=VOCABULARY_SIZE, hidden_size=64, num_hidden_layers=2)
        ),
        "did not keep the token",
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=VOCABULARY_SIZE, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
        ),
        "encoder-decoder",
    ),
    "llama, dynamic rope": (
        _of(
            hf.LlamaConfig, hf.LlamaForCausalLM,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        "RoPE scaling is 'dynamic'",
    ),
    "llama, dynamic rope as transformers 4 has it": (
        _of(hf.LlamaConfig, hf.LlamaForCausalLM, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "RoPE scaling is 'dynamic'",
    ),
}  # fmt: skip


def build(make: Callable[..., Any] | str, seed: int = SEED, **special: Any) -> Any:
    """Return a model in eval mode whose weights come from `seed`, larger than at birth: answers vary."""
    torch.manual_seed(seed)
    model = (SERVED[make] if isinstance(make, str) else make)(**special).eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.15)
    config = model.generation_config
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return model


def tokens(num_tokens: int, seed: int = 1, num_rows: int = 1) -> Any:
    """Return random tokens, [row, token]."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, VOCABULARY_SIZE, (num_rows, num_tokens), generator=source)


def answer(model: Any, prompt: Any, cache: Any = None, num_tokens: int = 12, **more: Any) -> Any:
    """Return prompt and greedy answer, [row, token]; without a cache, plain generate."""
    extra = {} if cache is None else {"past_key_values": cache}
    return model.generate(prompt, max_new_tokens=num_tokens, do_sample=False, **extra, **more)
