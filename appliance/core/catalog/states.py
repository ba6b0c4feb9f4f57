"""States of one fragment in one tier, and the names of the steps between them: transitions.py has the table.

Apart from that module because mypyc leaves enums and errors interpreted (setup.py).
"""

from collections.abc import Sequence
from enum import IntEnum


class State(IntEnum):
    """State of one fragment in one tier."""

    ABSENT = 0
    ARRIVING = 1
    RESIDENT = 2
    CONDEMNED = 3


STATE_MEANING = {
    State.ABSENT: "not in this tier",
    State.ARRIVING: "has a place; its bytes are promised or on their way; it cannot be read",
    State.RESIDENT: "complete, checksummed, readable",
    State.CONDEMNED: "must not be read any more, but a copy or reader still touches the place",
}


class Step(IntEnum):
    """What happens to one fragment in one tier."""

    RESERVE = 0  # a place was reserved for it
    LAND = 1  # its bytes arrived and were checksummed
    FAIL = 2  # its bytes will not arrive
    EVICT = 3  # it leaves; no copy or reader touches it
    CONDEMN = 4  # it must not be read any more; a copy or reader may still touch it
    QUIET = 5  # the last copy or reader let go of it


class InvalidTransition(AssertionError):
    """A step that the table does not have. Carries the history of the block."""

    def __init__(self, state: State, step: Step, subject: str, history: Sequence[str]) -> None:
        lines = "\n  ".join(history) or "(no history)"
        super().__init__(f"{subject}: {step.name} while {state.name}\n  {lines}")
