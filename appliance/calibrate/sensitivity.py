"""What the bits of each unit cost: measured at a few sizes, extended to the others.

One forward pass over the second part of the rows for each unit and coding. Units are single heads for `int`;
for `transform` all heads of a plane, which share a basis. Halving the step of a uniform quantiser quarters
the power of its error, and the divergence follows (between 3.5 and 5 from one bit to the next where it was
measured), so what lies beyond what was measured is taken to cost a quarter for each bit more; it is
rarely chosen, and the check sees to the rest.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from .allocation import CoderChoice
from .coding import EXACT, MEASURED_BITS, Coders, Coding, Kind, Unit, menu
from .state import Measurements
from .subject import Subject

EXTENDED_BITS: Final = (5, 6, 8)
FALL_PER_BIT: Final = 4.0
RAW_BITS: Final = 16.0

Choices: TypeAlias = dict[Unit, list[CoderChoice[Coding]]]


def units_of(subject: Subject, kind: Kind) -> list[Unit]:
    """Return what is coded alike."""
    num_layers, num_planes, _, _, num_heads, _ = subject.past.shape
    width = num_heads if kind == "transform" else 1
    return [
        Unit(layer, plane, head, width)
        for layer in range(num_layers)
        for plane in range(num_planes)
        for head in range(0, num_heads, width)
    ]


def num_measurements(subject: Subject, kind: Kind) -> int:
    """Return how many times `measure` calls `advance`."""
    return len(units_of(subject, kind)) * len(menu(kind))


def measure(
    subject: Subject,
    coders: Coders,
    kind: Kind,
    block_tokens: int,
    state: Measurements,
    advance: Callable[[], None] = lambda: None,
) -> Choices:
    """Return the choices of every unit. What `state` knows is not measured again."""
    choices: Choices = {}
    for unit in units_of(subject, kind):
        found = [CoderChoice(EXACT, RAW_BITS, 0.0)]
        for coding in menu(kind):
            key = f"{unit} {coding}"
            if key not in state.known:
                words, bits = coders.coded(unit, coding, block_tokens)
                state.keep(f"{key} bits", bits)
                state.keep(key, subject.loss_of({unit: words}))
            found.append(CoderChoice(coding, state.known[f"{key} bits"], state.known[key]))
            advance()
        choices[unit] = found + [wider for choice in found for wider in _extended(choice)]
    return choices


def _extended(choice: CoderChoice[Coding]) -> list[CoderChoice[Coding]]:
    """Return the codings behind the widest that was measured."""
    if choice.coding.coder != "int" or choice.coding.bits != MEASURED_BITS[-1]:
        return []
    return [
        CoderChoice(choice.coding._replace(bits=bits), choice.bits + more, choice.loss / FALL_PER_BIT**more)
        for bits in EXTENDED_BITS
        if (more := bits - choice.coding.bits)
    ]
