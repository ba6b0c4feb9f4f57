"""`python -m bench.compression.train [mha] [gqa]`: a small causal language model, trained here in minutes.

No weights lie in the repository and none are fetched, yet figures about what compressed KV does to perplexity
must come from a model that has learned something: one with random weights attends to nothing and forgives
everything. Two architectures with seeds of their own, so that a finding about one can fail on the other. The
result is an ordinary Hugging Face folder (weights, tokenizer), with the texts beside it that
`kvtier calibrate` is given.

Matrices are trained with Muon, everything else with AdamW: with AdamW alone a model of this size spends its
first minute at the perplexity of counting tokens. The last quarter sees 1,024 tokens of context, because what
a stored prefix is worth shows in the tokens after it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads spin otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import tokenizers
import torch
import transformers

from bench.compression import corpus
from bench.machine import ROOT

CACHE = ROOT / ".cache" / "compression"
VOCABULARY_SIZE = 1024
CONTEXT_TOKENS = 1024
WARMUP_STEPS = 20
SAVE_STEPS = 25
LEARNING_RATE = 0.01
EVALUATED_ROWS = 8


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """One model: its shape, and the seed of everything random about it."""

    seed: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int = 128
    num_layers: int = 6


class Stage(NamedTuple):
    """A stretch of training: short rows first, because words come before the past."""

    num_steps: int
    num_rows: int
    num_tokens: int


STAGES = (Stage(450, 4, 256), Stage(150, 2, CONTEXT_TOKENS))
RECIPES = {
    "mha": TrainingRecipe(seed=1, num_heads=2, num_kv_heads=2),
    "gqa": TrainingRecipe(seed=2, num_heads=4, num_kv_heads=2, num_layers=5),
}


def folder_of(name: str) -> Path:
    """Return the folder of the trained model of recipe `name`."""
    return CACHE / name


def is_trained(name: str) -> bool:
    """Return whether that folder holds a whole model."""
    return (folder_of(name) / "trained.json").is_file()


def train(name: str, recipe: TrainingRecipe, say: Any = print) -> dict[str, Any]:
    """Train one model and write its folder; return what is written into `trained.json`."""
    torch.manual_seed(recipe.seed)
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    train_text = corpus.text("train", 4_000_000)
    tokenizer = _tokenizer(train_text[:500_000])
    tokens = torch.tensor(tokenizer.encode(train_text).ids)
    heldout = torch.tensor(tokenizer.encode(corpus.text("heldout", 200_000)).ids)
    model = transformers.LlamaForCausalLM(_config(recipe))
    say(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights, {len(tokens)} tokens")
    began_at = time.process_time()
    _fit(model, tokens, folder / "partial.pt", say)
    model.eval().to(torch.bfloat16)
    quality = evaluate(model, tokens, heldout)
    found = {"recipe": name, "seed": recipe.seed, "cpu_s": round(time.process_time() - began_at), **quality}
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (folder / "calibrate.txt").write_text(corpus.text("calibrate", 200_000))
    (folder / "heldout.txt").write_text(corpus.text("heldout", 200_000))
    (folder / "trained.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _tokenizer(sample: str) -> Any:
    """Return a byte-level BPE tokenizer learned from `sample`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample], trainer)
    return tokenizer


def _config(recipe: TrainingRecipe) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.hidden_size * 8 // 3,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def _fit(model: Any, tokens: Any, partial: Path, say: Any) -> None:
    """Run the training; a run that was stopped goes on from `partial`, to the same weights."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "layers" in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "layers" not in name]
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    model.train()
    stages = [stage for stage in STAGES for _ in range(stage.num_steps)]
    begin = _resume(partial, model, optimizers)
    for step, stage in list(enumerate(stages))[begin:]:
        share = step / len(stages)
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, 2.05 * (1 - share))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * factor
        starts = torch.randint(len(tokens) - stage.num_tokens - 1, (stage.num_rows,))
        rows = torch.stack([tokens[start : start + stage.num_tokens + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % SAVE_STEPS == SAVE_STEPS - 1:
            say(f"  step {step + 1:4}  loss {loss.item():.3f}  {time.process_time():.0f} s", flush=True)
            parts = [model, *optimizers]
            torch.save([step + 1, torch.get_rng_state(), *(part.state_dict() for part in parts)], partial)
    partial.unlink(missing_ok=True)


def _resume(partial: Path, model: Any, optimizers: list[Any]) -> int:
    """Return the first step that was not taken yet, everything as it was then."""
    if not partial.exists():
        return 0
    step, random_state, *states = torch.load(partial, weights_only=True)
    torch.set_rng_state(random_state)
    for part, state in zip((model, *optimizers), states, strict=True):
        part.load_state_dict(state)
    return int(step)


def evaluate(model: Any, tokens: Any, heldout: Any) -> dict[str, Any]:
    """Return perplexities on held-out text: of the model by how much of the past it sees, and of counting
    tokens (unigram). A model that uses its past gets better with more of it."""
    counts = torch.bincount(tokens, minlength=VOCABULARY_SIZE).float() + 1
    unigram = -(counts / counts.sum()).log()
    num_rows = min(EVALUATED_ROWS, len(heldout) // (CONTEXT_TOKENS + 1))
    rows = heldout[: num_rows * (CONTEXT_TOKENS + 1)].view(num_rows, -1)
    asked = 64  # the last tokens of each row are asked for, with more or less before them
    found: dict[str, Any] = {"unigram_ppl": round(math.exp(unigram[rows[:, -asked:]].mean().item()), 2)}
    for num_kept in (0, 64, 256, 1024 - asked):
        seen = rows[:, -(num_kept + asked + 1) :]
        with torch.inference_mode():
            logits = model(input_ids=seen[:, :-1], use_cache=False).logits[:, -asked:].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), seen[:, -asked:].flatten())
        found[f"ppl_after_{num_kept}"] = round(math.exp(loss.item()), 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compression.train", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--again", action="store_true", help="train although it is there")
    args = parser.parse_args()
    for name in args.recipes:
        if args.again or not is_trained(name):
            train(name, RECIPES[name])
        print((folder_of(name) / "trained.json").read_text(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
