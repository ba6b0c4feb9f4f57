"""What a request of an engine process may have beside tokens, as JSON: what vLLM's own front doors take.

embeds      {"seed", "num", "width"}: a prompt of so many random embeddings instead of tokens
image       {"seed", "size"}: an image of random pixels for the first image token of the prompt
lora        {"name", "id", "path"}: an adapter
priority    number; lower ones run first
regex       what the answer must match
sampling    further arguments of SamplingParams, or in place of those of engine.py
hints       the JSON of a `kv_hints` envelope, for engines that have it
"""

from __future__ import annotations

from typing import Any

Ask = dict[str, Any]


def prompt_of(ask: Ask) -> dict[str, Any]:
    """Return the prompt as the engine takes it."""
    if wanted := ask.get("embeds"):
        import torch

        generator = torch.Generator().manual_seed(wanted["seed"])
        return {"prompt_embeds": torch.randn(wanted["num"], wanted["width"], generator=generator)}
    prompt: dict[str, Any] = {"prompt_token_ids": ask["tokens"]}
    if wanted := ask.get("image"):
        import numpy as np
        from PIL import Image

        shape = (wanted["size"], wanted["size"], 3)
        pixels = np.random.default_rng(wanted["seed"]).integers(0, 256, shape, dtype=np.uint8)
        prompt["multi_modal_data"] = {"image": Image.fromarray(pixels)}
    return prompt


def sampling_of(ask: Ask) -> dict[str, Any]:
    """Return further arguments of SamplingParams."""
    more = dict(ask.get("sampling", {}))
    if ask.get("regex"):
        from vllm.sampling_params import StructuredOutputsParams

        more["structured_outputs"] = StructuredOutputsParams(regex=ask["regex"])
        more |= {"ignore_eos": False, "detokenize": True}
    return more


def arguments_of(ask: Ask) -> dict[str, Any]:
    """Return further arguments of `LLMEngine.add_request`."""
    named: dict[str, Any] = {}
    if ask.get("lora"):
        from vllm.lora.request import LoRARequest

        named["lora_request"] = LoRARequest(ask["lora"]["name"], ask["lora"]["id"], ask["lora"]["path"])
    if "priority" in ask:
        named["priority"] = ask["priority"]
    if ask.get("hints"):
        named["kv_hints"] = _envelope(ask["hints"])
    return named


def _envelope(hints: dict[str, Any]) -> Any:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    return KvHintsEnvelope(**{**hints, "actions": [KvHintAction(**one) for one in hints["actions"]]})
