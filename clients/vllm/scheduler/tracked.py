"""What the scheduler's side remembers of one request."""

from dataclasses import dataclass
from typing import Any

from ....v1.types import Urgency
from .lookups import LookupAnswer, PendingLookup
from .saving import Saving
from .sessions import Turn


@dataclass(slots=True)
class Tracked:
    """One request from its arrival to its end."""

    request: Any
    turn: Turn
    saving: Saving
    asked: PendingLookup | None = None
    num_questions: int = 0
    polled_at: float | None = None  # when the scheduler first wanted the answer
    given_up: bool = False  # nothing more is loaded for it
    is_loading: bool = False
    promised: LookupAnswer | None = None
    may_be_early: bool = True  # promised before all of it has come up
    is_arriving: bool = False  # such a load is under way
    learned_from: LookupAnswer | None = None
    promised_from: int = 0  # tokens that the engine had when it was told
    adapter: bytes = b""
    urgency: Urgency = Urgency.QUEUED
    num_preemptions: int = 0
