"""Which session a request belongs to, and how urgent it is, as far as its caller says.

In `kv_transfer_params` of a request:

    kvtier_session       any text; requests with the same one are turns of one conversation.
                         Without it, the session id that the engine's own API was given
    kvtier_deadline_s    how soon the request wants its first token, in seconds from now
    kvtier_returns_in_s  when the next turn is expected, e.g. how long a tool call takes
    kvtier_last          true: this was the last turn
    kvtier_load          false: nothing is looked up for this request
    kvtier_save          false: nothing of it is stored. With neither, the appliance never hears of it

    kvtier_hints         an envelope as in the engine's own field `kv_hints`, for engines that have none

What the envelope says (clients/connector/kv_hints.py) is part of the turn. Without a name the request is a
session of its own, which ends with it; its id is prefixed with the engine's, because two engines may both
have a request "0".
"""

from typing import Any, NamedTuple

from ...connector.kv_hints import hints_of
from ...values.types import Retention

MAX_NAME = 256


class Turn(NamedTuple):
    """What a request says about itself. Times in seconds, None where it says nothing."""

    session: str
    deadline_s: float | None = None
    returns_in_s: float | None = None
    is_last: bool = True
    may_load: bool = True
    may_save: bool = True
    retention: tuple[Retention, ...] = ()
    num_ignored_hints: int = 0

    @property
    def is_private(self) -> bool:
        """Whether the appliance is to hear nothing of it."""
        return not (self.may_load or self.may_save)


def turn_of(request: Any, engine: str) -> Turn:
    """Return the turn that a request of the engine is. What makes no sense is ignored: it is a hint."""
    params = request.kv_transfer_params
    if not isinstance(params, dict):
        params = {}
    name = params.get("kvtier_session") or getattr(request, "session_id", None)
    named = isinstance(name, str) and 0 < len(name) <= MAX_NAME
    envelope = getattr(request, "kv_hints", None)
    hints = hints_of(params.get("kvtier_hints") if envelope is None else envelope, request.num_prompt_tokens)
    return Turn(
        str(name) if named else f"{engine}/{request.request_id}",
        _seconds(params.get("kvtier_deadline_s")),
        _seconds(params.get("kvtier_returns_in_s")),
        not named or bool(params.get("kvtier_last", False)) or hints.ends_session,
        params.get("kvtier_load", True) is not False,
        params.get("kvtier_save", True) is not False,
        hints.retention,
        hints.num_ignored,
    )


def _seconds(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e9 else None
