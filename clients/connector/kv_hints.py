"""`kv_hints`: what a router or an agent says with a request about the KV of it, in the engines' own envelope.

vLLM and SGLang carry the envelope on requests and leave the actions to whatever stores KV. Two of them mean
something here:

    kv.retain    how much ranges of the request's tokens are worth keeping, and for how long: Retention
    kv.evict     the session will not come back: it ends with this request

`kv.retain` comes in the two forms that are in use: `directives` with token ranges (vLLM), and `priority` with
`ttl_seconds` for the whole request (Dynamo). Its priorities begin at "not protected" where kvtier's 50 means
that nothing was said, so 1 to 100 become 51 to 100; 0, to release, is kvtier's 0.

A hint never fails a request: an action that makes no sense, that is of a later version or of another kind is
left out and counted. Block hashes in a payload are the engine's and name nothing here; an action that names
them and excludes the request itself is left out too. Rejected: refusing what is malformed, as the engines'
front doors may; behind them there is no one left to tell.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, Final, NamedTuple

from ..values.types import Retention

RETAIN: Final = "kv.retain"
EVICT: Final = "kv.evict"
MAX_ACTIONS: Final = 16  # what an engine takes, too; further ones are left out
MAX_RANGES: Final = 64  # of a call to the appliance
MAX_TTL_S: Final = 30 * 86_400.0
SAID_NOTHING: Final = 50  # kvtier's priority of blocks without a hint
MAJOR_VERSIONS: Final = ("0", "1")


class KvHints(NamedTuple):
    """What an envelope says of one request."""

    retention: tuple[Retention, ...] = ()
    ends_session: bool = False
    num_ignored: int = 0  # actions


NO_HINTS: Final = KvHints()


def hints_of(envelope: Any, num_prompt_tokens: int) -> KvHints:
    """Return what an envelope says: an engine's object, its JSON as a dictionary, or None.

    `num_prompt_tokens`: where the tokens begin that the request generates. Never raises."""
    if envelope is None:
        return NO_HINTS
    actions = _field(envelope, "actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return KvHints(num_ignored=1)
    retention: list[Retention] = []
    ends_session, num_ignored = False, max(0, len(actions) - MAX_ACTIONS)
    for action in islice(actions, MAX_ACTIONS):
        kind, payload = _field(action, "action_type"), _field(action, "payload")
        version = _field(action, "action_version")
        is_known = isinstance(version, str) and version.partition(".")[0] in MAJOR_VERSIONS
        ranges: list[Retention] | None = None
        if is_known and isinstance(payload, Mapping) and payload.get("include_current_request", True) is True:
            if kind == EVICT:
                ends_session, ranges = True, []
            elif kind == RETAIN:
                ranges = _ranges(payload, num_prompt_tokens)
        if ranges is None or len(retention) + len(ranges) > MAX_RANGES:
            num_ignored += 1
        else:
            retention += ranges
    return KvHints(tuple(retention), ends_session, num_ignored)


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _ranges(payload: Mapping[str, Any], num_prompt_tokens: int) -> list[Retention] | None:
    """Return the ranges of a `kv.retain`; None when one makes no sense: all count, or none."""
    if "directives" not in payload:
        one = _range(payload.get("priority"), 0, None, payload.get("ttl_seconds"))
        return None if one is None else [one]
    directives = payload["directives"]
    if not isinstance(directives, list) or len(directives) > MAX_RANGES:
        return None
    found = [_directive(directive, num_prompt_tokens) for directive in directives]
    ranges = [one for one in found if one is not None]
    return ranges if len(ranges) == len(found) else None


def _directive(directive: Any, num_prompt_tokens: int) -> Retention | None:
    if not isinstance(directive, Mapping):
        return None
    priority, ttl_s = directive.get("priority"), directive.get("duration")
    if directive.get("covers_output", False) is True:
        return _range(priority, num_prompt_tokens, None, ttl_s)
    return _range(priority, directive.get("start", 0), directive.get("end"), ttl_s)


def _range(priority: Any, first: Any, end: Any, ttl_s: Any) -> Retention | None:
    if not (_is_whole(priority) and 0 <= priority <= 100 and _is_whole(first) and first >= 0):
        return None
    if end is not None and not (_is_whole(end) and first < end < 1 << 31):
        return None
    if ttl_s is not None and not (_is_number(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        return None
    scaled = SAID_NOTHING + -(-priority // 2) if priority else 0
    return Retention(scaled, first, end, None if ttl_s is None else float(ttl_s))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 1 << 31


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and isfinite(value))
