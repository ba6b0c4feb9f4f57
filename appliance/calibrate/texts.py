"""From a model's name and a file of text to subjects: one to measure on, another to check on."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ...clients.errors import InvalidRequest
from ...clients.transformers.identity import model_digest
from .subject import TORCH_DTYPES, Subject, Unsuited

CHECK_SHARE = 2  # rows of the check for each row that is measured on


class Cut(NamedTuple):
    """How text is cut: rows, of which a prefix is stored and the rest is asked about."""

    num_rows: int
    prefix_tokens: int
    asked_tokens: int

    @property
    def row_tokens(self) -> int:
        """Return the number of tokens in one row."""
        return self.prefix_tokens + self.asked_tokens


class LoadedModel(NamedTuple):
    """A model, ready."""

    model: Any
    tokenizer: Any
    digest: bytes  # as clients.transformers names it
    dtype: str


def load(name: str, device: str, dtype: str | None) -> LoadedModel:
    """Return the model of a folder or of the hub's local cache. Raises Unsuited, saying what to do."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto").to(device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise Unsuited(f"{name!r} cannot be loaded: {reason}") from error
    found = str(model.dtype).removeprefix("torch.")
    if found not in TORCH_DTYPES:
        raise Unsuited(
            f"the model keeps its past in {found}, and profiles are for {' and '.join(TORCH_DTYPES)}; say "
            "--dtype bfloat16 if that is how it is run"
        )
    try:
        digest = model_digest(model)
    except InvalidRequest as error:
        raise Unsuited(error.message) from error
    return LoadedModel(model, tokenizer, digest, found)


def tokens_of(loaded: LoadedModel, text: str, cut: Cut, path: Path, num_rows: int = 0) -> Any:
    """Return `num_rows` rows of tokens, [row, token].
    By default those to measure on, behind them those to check on. Raises Unsuited when the text is too short.
    """
    ids = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    num_rows = num_rows or (1 + CHECK_SHARE) * cut.num_rows
    if len(ids) < num_rows * cut.row_tokens:
        raise Unsuited(
            f"{path} has {len(ids)} tokens, and {num_rows} rows of {cut.row_tokens} are wanted; give a "
            "longer text, or fewer --rows, or a shorter --prefix"
        )
    step = len(ids) // num_rows  # spread over the whole text
    return torch.tensor([ids[row * step : row * step + cut.row_tokens] for row in range(num_rows)])


def subjects(loaded: LoadedModel, tokens: Any, cut: Cut) -> tuple[Subject, Subject]:
    """Return the rows to measure on and those to check on. Raises Unsuited."""
    return (
        Subject(loaded.model, tokens[: cut.num_rows], cut.prefix_tokens, loaded.dtype),
        Subject(loaded.model, tokens[cut.num_rows :], cut.prefix_tokens, loaded.dtype),
    )


def text_digest(tokens: Any) -> str:
    """Return a short name of the rows."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
