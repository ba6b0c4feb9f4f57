"""The states of one fragment in one tier. The steps between them are in transitions.py."""

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
