"""Assigns bits to units: the smallest profile with a predicted loss within a budget, or the best of a size.

Every unit has choices: a size and a loss each. Of these only the lower convex hull is of interest, and along
it each step down in loss costs ever more bits; taking the steps of all units in the order of loss saved per
bit spent is the optimum of the relaxed problem, and off by at most one step in the real one (the greedy of
marginal returns; Fox 1966, as in KVTuner and in every rate allocator since). Dynamic programming over bits
was rejected: it buys the last step at a thousand times the work.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

UnitT = TypeVar("UnitT")
CodingT = TypeVar("CodingT")


class CoderChoice(NamedTuple, Generic[CodingT]):
    """One way to code a unit: what it takes, and what it is predicted to cost."""

    coding: CodingT
    bits: float  # a value, scales included
    loss: float  # nats a token


class BitStep(NamedTuple):
    """Half-open move of one unit along its hull: to choice `rank`."""

    gain: float  # loss saved for each bit more
    order: int  # of the unit; so that equal gains have an order
    rank: int


def hull(choices: Sequence[CoderChoice[CodingT]]) -> list[CoderChoice[CodingT]]:
    """Return the choices no mixture of others beats, by rising size and falling loss."""
    kept: list[CoderChoice[CodingT]] = []
    for choice in sorted(choices, key=lambda one: (one.bits, one.loss)):
        if kept and choice.loss >= kept[-1].loss:
            continue
        while len(kept) > 1 and _gain(kept[-2], choice) >= _gain(kept[-2], kept[-1]):
            kept.pop()
        kept.append(choice)
    return kept


def _gain(before: CoderChoice[CodingT], after: CoderChoice[CodingT]) -> float:
    return (before.loss - after.loss) / (after.bits - before.bits)


def allocate(
    choices: Mapping[UnitT, Sequence[CoderChoice[CodingT]]],
    *,
    loss: float | None = None,
    bits: float | None = None,
) -> dict[UnitT, CoderChoice[CodingT]]:
    """Return a choice for each unit. All units have the same number of values.

    With `loss`: the fewest bits with a predicted loss of at most that (the finest choices where even they
    exceed it). With `bits`: the least predicted loss with at most so many bits a value on average (the
    coarsest choices where even they exceed it). Deterministic.
    """
    assert (loss is None) != (bits is None), "one budget"
    units = list(choices)
    hulls = [hull(choices[unit]) for unit in units]
    steps = sorted(
        (
            BitStep(_gain(one[rank - 1], one[rank]), order, rank)
            for order, one in enumerate(hulls)
            for rank in range(1, len(one))
        ),
        key=lambda step: (-step.gain, step.order, step.rank),
    )
    ranks = [0] * len(units)
    total_loss = sum(one[0].loss for one in hulls)
    spare_bits = (bits or 0.0) * len(units) - sum(one[0].bits for one in hulls)
    closed: set[int] = set()  # a step that did not fit: those behind it are out of order
    for _, order, rank in steps:
        if loss is not None and total_loss <= loss:
            break
        before, after = hulls[order][rank - 1], hulls[order][rank]
        if bits is not None and (order in closed or after.bits - before.bits > spare_bits + 1e-9):
            closed.add(order)
            continue
        ranks[order] = rank
        total_loss += after.loss - before.loss
        spare_bits -= after.bits - before.bits
    return {unit: one[rank] for unit, one, rank in zip(units, hulls, ranks, strict=True)}


def total_loss(allocated: Mapping[UnitT, CoderChoice[CodingT]]) -> float:
    """Return the predicted loss: the sum over units."""
    return sum(choice.loss for choice in allocated.values())
