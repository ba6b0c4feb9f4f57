"""A real decoder transformer, Hugging Face's Llama, small and untrained: what it says is noise, and what it
computes, and what that costs, is the real thing.

Prefill goes in steps of `STEP_TOKENS`, whether its beginning is computed or comes from kvtier. A matrix
product over 128 rows and one over 96 differ in the last bit; with equal steps every number is the result of
the same operation in both runs, so that outputs can be compared bit for bit. The price is about an eighth of
the prefill time against one single step, in both runs alike.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .texts import VOCABULARY_SIZE

STEP_TOKENS = 128
SEED = 1


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy answer: its tokens, and for each the logits it was chosen from, [token, vocabulary]."""

    tokens: list[int]
    logits: torch.Tensor

    def equals(self, other: "Generation") -> bool:
        """Return whether tokens and logits are the same, bit for bit."""
        return self.tokens == other.tokens and torch.equal(self.logits, other.logits)


class Model:
    """Weights from a seed. One prompt at a time; not thread-safe."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(SEED)
        self.config = LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=8192,
            initializer_range=0.05,
            dtype="float32",
        )
        self.llama = LlamaForCausalLM(self.config).eval()
        self.num_parameters = sum(weights.numel() for weights in self.llama.parameters())

    def new_cache(self) -> DynamicCache:
        """Return an empty cache."""
        return DynamicCache(config=self.config)

    @torch.inference_mode()
    def prefill(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        """Compute what `cache` does not hold yet; return the logits after the last token. Mutates `cache`.

        What the cache holds must end where a step ends.
        """
        first = cache.get_seq_length()
        assert first % STEP_TOKENS == 0
        assert first < len(tokens), "at least one token must be left to compute"
        for start in range(first, len(tokens), STEP_TOKENS):
            logits = self._forward(tokens[start : start + STEP_TOKENS], cache)
        return logits

    @torch.inference_mode()
    def decode(self, logits: torch.Tensor, cache: DynamicCache, num_tokens: int) -> Generation:
        """Answer greedily from the logits after the prompt. Mutates `cache`."""
        tokens, rows = [], []
        for left in reversed(range(num_tokens)):
            rows.append(logits)
            tokens.append(int(logits.argmax()))
            if left:
                logits = self._forward(tokens[-1:], cache)
        return Generation(tokens, torch.stack(rows))

    def _forward(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        ids = torch.tensor([tokens])
        answer = self.llama(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return answer.logits[0, -1]
