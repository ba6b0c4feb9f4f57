"""From measured losses to a profile that keeps its budget: allocate, check on other text, adjust, repeat.

The check runs whole blocks through the codec that the daemon uses, so that what it finds is what readers
will get. The predicted loss that just keeps the budget is bracketed and then bisected, by ratios; the
allocation that keeps it with the fewest bits wins.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ...tiers.codecs.base import DoesNotFit, Shape
from ...tiers.codecs.lossy.profile import Profile, Rule, Scalar
from ...tiers.codecs.lossy.profiled import Profiled
from .allocation import CoderChoice, allocate, total_loss
from .budget import Budget
from .coding import Coders, Coding, Unit, Words
from .sensitivity import Choices
from .subject import Quality, Subject

MAX_CHECKS = 8
CLOSE_ENOUGH = 1.2  # of the losses that keep and that exceed the budget


class NotKept(Exception):
    """No profile that keeps the budget was found; the message says how near it came."""


@dataclass(frozen=True, slots=True)
class CodedModel:
    """The model that a profile is searched for: its digest, its dtype, its blocks and their coders."""

    digest: bytes
    dtype: str
    block_tokens: int
    coders: Coders  # fitted to text that is not the check's


@dataclass(frozen=True, slots=True)
class Checked:
    """One allocation, and what the check found."""

    allocated: Mapping[Unit, CoderChoice[Coding]]
    quality: Quality
    stored_bits: float  # a value, as the codec wrote it
    predicted_loss: float

    @property
    def ratio(self) -> float:
        """Return raw bytes over stored bytes."""
        return 16 / self.stored_bits


def check(model: CodedModel, text: Subject, allocated: Mapping[Unit, CoderChoice[Coding]]) -> Checked:
    """Return the quality of a profile on `text`: its whole past is coded, and the answers are compared."""
    codings = {unit: choice.coding for unit, choice in allocated.items()}
    past, stored_bits = through_codec(profile_of(model, text.past, codings), text.past, model.block_tokens)
    return Checked(allocated, text.quality_of(past), stored_bits, total_loss(allocated))


def search(
    model: CodedModel,
    text: Subject,
    choices: Choices,
    budget: Budget,
    advance: Callable[[Checked], None] = lambda _: None,
) -> Checked:
    """Return the smallest checked allocation within `budget`. Raises NotKept."""
    if budget.kind == "ratio":
        checked = check(model, text, allocate(choices, bits=16 / budget.amount))
        advance(checked)
        return checked
    kept: Checked | None = None
    loss, kept_loss, exceeded_loss = budget.loss, 0.0, math.inf
    for _ in range(MAX_CHECKS):
        checked = check(model, text, allocate(choices, loss=loss))
        advance(checked)
        if budget.is_kept(checked.quality.ppl_increase, checked.quality.kl):
            kept_loss = loss
            if kept is None or checked.stored_bits < kept.stored_bits:
                kept = checked
        else:
            exceeded_loss = loss
        if exceeded_loss <= kept_loss * CLOSE_ENOUGH:
            break
        loss = (
            math.sqrt(kept_loss * exceeded_loss)
            if kept_loss and exceeded_loss < math.inf
            else loss * 2 if kept_loss else loss / 4
        )  # fmt: skip
    if kept is None:
        raise NotKept(
            f"{budget} is not kept even with {checked.stored_bits:.2f} bits a value (perplexity "
            f"{100 * checked.quality.ppl_increase:+.2f} % ± {100 * checked.quality.nll_error:.2f}, "
            f"KL {checked.quality.kl:.2g}); allow more, or check on more rows (--rows)"
        )
    return kept


def uniform(choices: Choices, coding: Coding) -> dict[Unit, CoderChoice[Coding]]:
    """Return the same for every unit: what to compare with.
    Of int, keys are per channel and values per token."""
    found = {}
    for unit, of_unit in choices.items():
        axis = ("channel", "token")[unit.plane] if coding.coder == "int" else coding.axis
        found[unit] = next(one for one in of_unit if one.coding == coding._replace(axis=axis))
    return found


def profile_of(
    model: CodedModel,
    past: Words,
    codings: Mapping[Unit, Coding],
    calibration: Mapping[str, Scalar] | None = None,
) -> Profile:
    """Return the profile that codes each unit that way; neighbours that agree share a rule."""
    num_layers, num_planes, _, _, num_heads, head_dim = past.shape
    rules: list[Rule] = []
    tables: list[bytes] = []
    for (layer, plane, coding), run in groupby(sorted(codings), lambda unit: (*unit[:2], codings[unit])):
        units = list(run)
        if coding.coder != "transform":  # heads of a transform would have to share a table
            units = [Unit(layer, plane, units[0].first_head, sum(unit.num_heads for unit in units))]
        for unit in units:
            rule, table = model.coders.rule(unit, coding, len(tables))
            rules.append(rule)
            tables += [table] if table else []
    return Profile(
        model.digest,
        num_layers,
        num_heads,
        head_dim,
        num_planes,
        model.dtype,
        tuple(rules),
        tables=tuple(tables),
        calibration=calibration or {},
    )


def through_codec(profile: Profile, past: Words, block_tokens: int) -> tuple[Words, float]:
    """Return what readers would get of `past`, and the bits a value that are stored.
    `past`: [layer, plane, row, token, head, dim], whole blocks of every row."""
    num_layers, num_planes, num_rows, num_tokens, num_heads, head_dim = past.shape
    assert num_tokens % block_tokens == 0
    codec = Profiled(profile)
    shape = Shape(num_layers, num_planes, block_tokens, num_heads, head_dim, profile.dtype)
    place, raw = np.empty(codec.stored_bound(shape), np.uint8), np.empty(shape.raw_bytes, np.uint8)
    read = past.copy()
    num_stored = 0
    for row in range(num_rows):
        for first in range(0, num_tokens, block_tokens):
            there = (slice(None), slice(None), row, slice(first, first + block_tokens))
            payload = np.ascontiguousarray(past[there]).view(np.uint8).reshape(-1)
            try:
                num_stored += codec.encode(shape, payload.data, place.data)
            except DoesNotFit:
                num_stored += shape.raw_bytes
                continue
            codec.decode(shape, place.data, raw.data)
            read[there] = raw.view(np.uint16).reshape(read[there].shape)
    return read, 8 * num_stored / past.size
