"""One unit through the coders of the codec itself: what comes back, and what it took.

The search does not imitate the codec, it calls it: segments of one unit, block after block, exactly as they
lie in a fragment. So what was predicted and what is stored later cannot drift apart.
"""

from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ...tiers.codecs.base import DoesNotFit
from ...tiers.codecs.lossy.profile import Axis, Coder, Rule
from ...tiers.codecs.lossy.profiled import coder_of
from ...tiers.codecs.lossy.transform_fit import fit_table

Words: TypeAlias = NDArray[np.uint16]  # float16 or bfloat16, as bits
Kind: TypeAlias = Literal["int", "transform"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
MEASURED_BITS: Final = (2, 3, 4)
MEASURED_STEPS: Final = (0.2, 0.3, 0.45, 0.67, 1.0, 1.5)  # of the unit's deviation
MAX_FITTED_TOKENS: Final = 1 << 16


class Unit(NamedTuple):
    """What is coded alike: some heads of K (plane 0) or V (plane 1) of one layer."""

    layer: int
    plane: int
    first_head: int
    num_heads: int = 1

    @property
    def heads(self) -> slice:
        """Return the unit's heads, as an index."""
        return slice(self.first_head, self.first_head + self.num_heads)

    def __str__(self) -> str:
        return f"{self.layer}.{'kv'[self.plane]}.{self.first_head}+{self.num_heads}"


class Coding(NamedTuple):
    """How a unit may be written."""

    coder: Coder = "int"
    bits: int = 0
    axis: Axis = "token"
    step: float = 0.0  # of `transform`, in deviations of the unit

    def __str__(self) -> str:
        if self.coder == "transform":
            return f"transform {self.step:g}"
        return self.coder if self.coder == "exact" else f"int{self.bits} {self.axis}"


EXACT: Final = Coding("exact")


def menu(kind: Kind) -> tuple[Coding, ...]:
    """Return the codings to measure. Keys are not bound to channels nor values to tokens:
    which way the outliers lie is a matter of the model, and is measured."""
    if kind == "transform":
        return tuple(Coding("transform", step=step) for step in MEASURED_STEPS)
    return tuple(Coding("int", bits, axis) for axis in ("channel", "token") for bits in MEASURED_BITS)


class Coders:
    """Rules and coders for the units of one model; tables of transforms are fitted to `past`."""

    def __init__(self, past: Words, dtype: str) -> None:
        """`past` is [layer, plane, row, token, head, dim]; it is kept, and not written to."""
        self._past = past
        self._is_half = dtype == "float16"
        self._fits: dict[tuple[Unit, Coding], tuple[float, bytes, float]] = {}

    def rule(self, unit: Unit, coding: Coding, table: int = 0) -> tuple[Rule, bytes]:
        """Return the rule that writes `unit` so, and its table, empty without one; `table` is its number."""
        heads = (unit.first_head, unit.first_head + unit.num_heads)
        if coding.coder == "transform":
            step, fitted, reserve_bits = self._fit(unit, coding)
            rule = Rule(
                unit.layer, unit.plane, *heads, "transform", step=step, reserve_bits=reserve_bits, table=table
            )
            return rule, fitted
        return Rule(unit.layer, unit.plane, *heads, coding.coder, coding.bits, coding.axis), b""

    def coded(self, unit: Unit, coding: Coding, block_tokens: int) -> tuple[Words, float]:
        """Return what is read back of `unit`, [row, token, head, dim], and the bits a value that took.
        Blocks that the coder refuses (values not finite, or out of range) are stored as they are."""
        words = np.ascontiguousarray(self._past[unit.layer, unit.plane, :, :, unit.heads])
        num_rows, num_tokens, _, head_dim = words.shape
        assert num_tokens % block_tokens == 0
        rule, table = self.rule(unit, coding)
        alone = replace(rule, first_head=0, end_head=unit.num_heads)
        coder = coder_of(alone, head_dim, is_half=self._is_half, tables=(table,))
        place = np.empty(coder.stored_bytes(block_tokens), np.uint8)
        read, num_bytes = words.copy(), 0
        for row in range(num_rows):
            for first in range(0, num_tokens, block_tokens):
                block = words[row, first : first + block_tokens]
                try:
                    num_bytes += coder.encode(block, place)
                except DoesNotFit:
                    num_bytes += block.nbytes
                    continue
                coder.decode(place, read[row, first : first + block_tokens])
        return read, 8 * num_bytes / words.size

    def _fit(self, unit: Unit, coding: Coding) -> tuple[float, bytes, float]:
        """Return step, table and bits to reserve, fitted once."""
        if (unit, coding) not in self._fits:
            words = np.ascontiguousarray(self._past[unit.layer, unit.plane, :, :, unit.heads])
            flat = words.reshape(-1, unit.num_heads * words.shape[-1])
            values = _numbers(flat[:: -(-len(flat) // MAX_FITTED_TOKENS)], self._is_half)
            step = coding.step * float((values - values.mean(axis=0)).std())
            self._fits[unit, coding] = (step, *fit_table(values, step))
        return self._fits[unit, coding]


def _numbers(words: Words, is_half: bool) -> NDArray[np.float32]:
    if is_half:
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)
