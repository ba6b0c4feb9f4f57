"""THE transition table: what can become of one fragment in one tier.

Everything that changes where a fragment is goes through `next_state`; a step that is not in the table is a
programmer error and stops the daemon's test builds with the story of the block. docs/states.md is
generated from this table.
"""

from enum import IntEnum


class State(IntEnum):
    """State of one fragment in one tier."""

    ABSENT = 0
    ARRIVING = 1
    RESIDENT = 2
    CONDEMNED = 3


STATE_MEANING = {
    State.ABSENT: "not in this tier",
    State.ARRIVING: "has a place; its bytes are promised or on their way; nobody may read it",
    State.RESIDENT: "complete, checksummed, readable",
    State.CONDEMNED: "must not be read any more, but a copy or reader still touches the place",
}


class Step(IntEnum):
    """What happens to one fragment in one tier."""

    RESERVE = 0  # a place was taken for it
    LAND = 1  # its bytes arrived and were checksummed
    FAIL = 2  # its bytes will not arrive
    EVICT = 3  # it is given up; nobody touches it
    CONDEMN = 4  # it must not be read any more, but somebody still touches it
    QUIET = 5  # the last one who touched it let go


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.ABSENT, Step.RESERVE): State.ARRIVING,
    (State.ARRIVING, Step.LAND): State.RESIDENT,
    (State.ARRIVING, Step.FAIL): State.ABSENT,
    (State.RESIDENT, Step.EVICT): State.ABSENT,
    (State.RESIDENT, Step.CONDEMN): State.CONDEMNED,
    (State.CONDEMNED, Step.QUIET): State.ABSENT,
}


#: The same table by position, for the code that is run for every fragment: NEXT[state][step].
NEXT: list[list[State | None]] = [[TRANSITIONS.get((state, step)) for step in Step] for state in State]


class InvalidTransition(AssertionError):
    """A step that the table does not know. Carries the story of the block."""

    def __init__(self, state: State, step: Step, subject: str, story: list[str]) -> None:
        lines = "\n  ".join(story) or "(no story)"
        super().__init__(f"{subject}: {step.name} while {state.name}\n  {lines}")
