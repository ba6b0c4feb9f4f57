"""What may be lost, as an administrator writes it: `ppl +0.5%`, `kl 0.002`, or only a size, `ratio 4.5`."""

import math
import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

Kind: TypeAlias = Literal["ppl", "kl", "ratio"]
EXAMPLES: Final = "'ppl +0.5%', 'kl 0.002' or 'ratio 4.5'"
_BUDGET = re.compile(r"\s*(ppl|kl|ratio)\s*(\+?)\s*([0-9]*\.?[0-9]+(?:[eE]-?[0-9]+)?)\s*(%|x|)\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be lost: an `amount` of one kind.
    `ppl`: relative increase of perplexity on the text of the check; `kl`: nats a token; `ratio`: raw bytes
    over stored ones, whatever it costs."""

    kind: Kind
    amount: float

    @property
    def loss(self) -> float:
        """Return the Kullback-Leibler divergence to begin with, nats a token:
        for a model that is right on average, the logarithm of perplexity rises by as much."""
        return math.log1p(self.amount) if self.kind == "ppl" else self.amount

    def is_kept(self, ppl_increase: float, kl: float) -> bool:
        """Return whether what was measured is within it. A ratio is kept by construction."""
        if self.kind == "ppl":
            return ppl_increase <= self.amount
        return self.kind == "ratio" or kl <= self.amount

    def __str__(self) -> str:
        if self.kind == "ppl":
            return f"ppl +{100 * self.amount:g}%"
        return f"{self.kind} {self.amount:g}"


def parse_budget(text: str) -> Budget:
    """Read a budget. Raises ValueError, saying how to write one."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no budget; write {EXAMPLES}")
    kind, plus, number, unit = cast(Kind, match[1]), match[2], float(match[3]), match[4]
    if (kind == "ppl") != (unit == "%") or (unit == "x" and kind != "ratio") or (plus and kind != "ppl"):
        raise ValueError(f"{text!r} is no budget; write {EXAMPLES}")
    amount = number / 100 if kind == "ppl" else number
    if not (1 < amount <= 16 if kind == "ratio" else 0 < amount < 1):
        raise ValueError(f"{text!r} is out of range; write {EXAMPLES}")
    return Budget(kind, amount)
