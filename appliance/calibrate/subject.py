"""The model under test: what it keeps of a text, and how it goes on after a past that is not quite that.

Every row of text is cut in two. The first part is read once; its keys (after RoPE) and values are taken out
of the cache, in the dtype a runtime keeps them. The second part is then read with the exact past, and with
others, and the distributions of the next token are compared. That is what a stored prefix is: nothing of the
second part is ever coded.

The model computes in float32 whatever its weights are, because rounding in bfloat16 amplifies a change in the
past no one would notice into differences larger than those to be measured; `dtype` is the cache's alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .coding import Unit, Words

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Unsuited(Exception):
    """This model, or this text, cannot be calibrated; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How much the model's predictions change when its KV was coded. Losses are in nats a token."""

    kl: float  # of the next token's distribution, exact against coded
    exact_nll: float
    coded_nll: float
    nll_error: float  # standard error of coded_nll - exact_nll, from row to row
    flips: float  # share of tokens after which another token is the most likely
    attention_error: float  # of what attention layers put out: norm of the difference by norm

    @property
    def ppl_increase(self) -> float:
        """Return the relative increase of perplexity: 0.005 is half a percent."""
        return math.expm1(self.coded_nll - self.exact_nll)

    @property
    def exact_ppl(self) -> float:
        """Return the perplexity after the exact past."""
        return math.exp(self.exact_nll)


class Subject:
    """A model and the rows it is asked about. Not thread-safe."""

    def __init__(
        self, model: Any, tokens: Any, prefix_tokens: int, dtype: str, rows_per_pass: int = 8
    ) -> None:
        """`tokens`: integers [row, token], of which the first `prefix_tokens` are the stored past. The model
        is cast to float32 in place. Raises Unsuited for caches without one key and value a token."""
        if dtype not in TORCH_DTYPES:
            raise Unsuited(
                f"profiles are for a cache of {' or '.join(TORCH_DTYPES)}, not {dtype}; say --dtype"
            )
        self._model = model.float().eval()
        self._device = model.device
        self.dtype = dtype
        self._suffixes = tokens[:, prefix_tokens:]
        self._passes = [slice(i, i + rows_per_pass) for i in range(0, len(tokens), rows_per_pass)]
        self.past = np.concatenate(
            [self._read(tokens[rows, :prefix_tokens]) for rows in self._passes], axis=2
        )  # [layer, plane, row, token, head, dim]
        self._answers = [self._answer(rows, self._states(self.past, rows)) for rows in self._passes]

    def loss_of(self, changed: Mapping[Unit, Words]) -> float:
        """Return the mean divergence of the answers, nats a token, when these units are replaced.
        `changed`: words [row, token, head, dim] of each."""
        total = count = 0.0
        for rows, exact in zip(self._passes, self._answers, strict=True):
            states = self._states(self.past, rows)
            for unit, words in changed.items():
                changed_heads = self._tensor(words[rows]).transpose(1, 2)
                states[unit.layer][unit.plane][:, unit.heads] = changed_heads
            divergence = _divergence(exact, self._answer(rows, states))
            total += divergence.double().sum().item()
            count += divergence.numel()
        return total / count

    def quality_of(self, past: Words) -> Quality:
        """Return all that is asked of a whole past, shaped as `self.past`."""
        sums: dict[str, list[Any]] = {name: [] for name in ("kl", "flip", "exact", "coded")}
        squares = np.zeros(2)  # of the attention layers' outputs: difference, exact
        for rows, exact in zip(self._passes, self._answers, strict=True):
            with _outputs_of_attention(self._model) as before:
                self._answer(rows, self._states(self.past, rows))
            with _outputs_of_attention(self._model) as after:
                coded = self._answer(rows, self._states(past, rows))
            for one, other in zip(before, after, strict=True):
                squares += (one - other).square().sum().item(), one.square().sum().item()
            targets = self._suffixes[rows, 1:].to(self._device)
            sums["kl"].append(_divergence(exact, coded))
            sums["flip"].append((exact.argmax(-1) != coded.argmax(-1)).float())
            sums["exact"].append(cross_entropy(exact.transpose(1, 2), targets, reduction="none"))
            sums["coded"].append(cross_entropy(coded.transpose(1, 2), targets, reduction="none"))
        rows_of = {name: torch.cat(parts).double().mean(dim=1).cpu().numpy() for name, parts in sums.items()}
        moved = rows_of["coded"] - rows_of["exact"]
        return Quality(
            kl=float(rows_of["kl"].mean()),
            exact_nll=float(rows_of["exact"].mean()),
            coded_nll=float(rows_of["coded"].mean()),
            nll_error=float(moved.std(ddof=1) / math.sqrt(len(moved))) if len(moved) > 1 else math.inf,
            flips=float(rows_of["flip"].mean()),
            attention_error=math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0,
        )

    def _read(self, tokens: Any) -> Words:
        """Read a past; return it as words, [layer, plane, row, token, head, dim]."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(input_ids=tokens.to(self._device), past_key_values=cache, use_cache=True)
        layers = []
        for number, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer or layer.keys.shape != layer.values.shape:
                raise Unsuited(
                    f"layer {number} keeps {type(layer).__name__}: profiles are for models that keep "
                    "a key and a value of one size for every token, not sliding windows, latents, or states"
                )
            planes = [
                one.to(TORCH_DTYPES[self.dtype]).transpose(1, 2).contiguous().cpu().view(torch.int16)
                for one in (layer.keys, layer.values)
            ]
            layers.append(torch.stack(planes))
        words: Words = torch.stack(layers).numpy().view(np.uint16)
        return words

    def _states(self, past: Words, rows: slice) -> list[list[Any]]:
        """Return [layer][plane] tensors [row, head, token, dim], float32, that may be written to."""
        return [
            [self._tensor(past[layer, plane, rows]).transpose(1, 2).contiguous() for plane in range(2)]
            for layer in range(len(past))
        ]

    def _tensor(self, words: Words) -> Any:
        numbers = torch.from_numpy(np.ascontiguousarray(words).view(np.int16)).view(TORCH_DTYPES[self.dtype])
        return numbers.to(self._device).float()

    def _answer(self, rows: slice, states: Sequence[Sequence[Any]]) -> Any:
        """Return logarithms of the next token's probabilities, [row, asked, vocabulary], float32."""
        cache = DynamicCache(config=self._model.config)
        for layer, (keys, values) in enumerate(states):
            cache.update(keys, values, layer)
        suffix = self._suffixes[rows].to(self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=suffix, past_key_values=cache, use_cache=True).logits
            return logits[:, :-1].float().log_softmax(-1)


def _divergence(exact: Any, coded: Any) -> Any:
    """Return the divergence of each asked token, [row, asked]."""
    return kl_div(coded, exact, log_target=True, reduction="none").sum(-1)


@contextmanager
def _outputs_of_attention(model: Any) -> Iterator[list[Any]]:
    """Collect what the attention layers of `model` put out meanwhile, in order."""
    found: list[Any] = []

    def collect(module: Any, args: Any, output: Any) -> None:
        del module, args
        found.append((output[0] if isinstance(output, tuple) else output).float())

    attentions = [one for one in model.modules() if type(one).__name__.endswith("Attention")]
    hooks = [one.register_forward_hook(collect) for one in attentions]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
