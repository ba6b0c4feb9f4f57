"""kv_hints: what an envelope means, and that whatever makes no sense is left out and harms nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.clients import Retention
from kvtier.clients.connector.kv_hints import MAX_ACTIONS, MAX_RANGES, MAX_TTL_S, NO_HINTS, hints_of

PROMPT = 100  # tokens


def action(payload: Any, kind: Any = "kv.retain", version: Any = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def retained(*directives: Any) -> tuple[Retention, ...]:
    found = hints_of(envelope(action({"scope": "alice", "directives": list(directives)})), PROMPT)
    assert bool(found.num_ignored) == (not found.retention and bool(directives))
    return found.retention


def test_ranges_of_tokens_are_kept_for_as_long_as_said() -> None:
    assert retained(
        {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
        {"start": 32, "end": None, "priority": 40},
        {"covers_output": True, "priority": 2, "duration": 5},
    ) == (Retention(90, 0, 32, 60.0), Retention(70, 32, None, None), Retention(51, PROMPT, None, 5.0))


@pytest.mark.parametrize(("said", "priority"), [(0, 0), (1, 51), (2, 51), (50, 75), (99, 100), (100, 100)])
def test_any_protection_counts_more_than_none_and_a_release_less(said: int, priority: int) -> None:
    assert retained({"priority": said}) == (Retention(priority),)


def test_a_priority_of_the_whole_request_for_some_seconds() -> None:
    payload = {
        "priority": 3,
        "ttl_seconds": 2.5,
        "execute_at": "request_completion",
        "include_current_request": True,
        "block_hashes": ["11"],
    }
    assert hints_of(envelope(action(payload, version="0.1")), PROMPT).retention == (Retention(52, ttl_s=2.5),)
    others = hints_of(envelope(action({**payload, "include_current_request": False})), PROMPT)
    assert others == ((), False, 1), "the engine's own block hashes name nothing here"


def test_an_eviction_ends_the_session() -> None:
    payload = {"execute_at": "request_completion", "include_current_request": True, "block_hashes": ["11"]}
    assert hints_of(envelope(action(payload, "kv.evict")), PROMPT) == ((), True, 0)


def test_an_engines_object_says_what_its_json_says() -> None:
    one = SimpleNamespace(**action({"priority": 100}))
    assert hints_of(SimpleNamespace(actions=[one]), PROMPT).retention == (Retention(100),)


@pytest.mark.parametrize(
    "directive",
    [
        {"start": 0, "end": 16},
        {"priority": 101},
        {"priority": -1},
        {"priority": True},
        {"priority": 10.0},
        {"priority": "10"},
        {"start": -1, "priority": 10},
        {"start": 16, "end": 16, "priority": 10},
        {"start": 1 << 40, "priority": 10},
        {"end": 1 << 40, "priority": 10},
        {"priority": 10, "duration": 0},
        {"priority": 10, "duration": float("nan")},
        {"priority": 10, "duration": float("inf")},
        {"priority": 10, "duration": 10**400},
        {"priority": 10, "duration": MAX_TTL_S + 1},
        "no object",
        None,
    ],
)
def test_a_range_that_makes_no_sense_takes_its_action_with_it_and_no_other(directive: Any) -> None:
    bad = action({"directives": [{"priority": 90}, directive]})
    good = action({"directives": [{"priority": 50}]})
    assert hints_of(envelope(bad, good), PROMPT) == ((Retention(75),), False, 1)


@pytest.mark.parametrize(
    "one",
    [
        None,
        "text",
        {},
        action({"directives": {}}),
        action({"directives": "text"}),
        action([]),
        action(None),
        action({"priority": 5}, version="2.0"),
        action({"priority": 5}, version=1),
        action({"priority": 5}, version=None),
        action({"source": "host:1"}, "kv.fetch"),
        action({}, kind=["kv.retain"]),
    ],
)
def test_an_action_of_another_kind_or_version_is_left_out(one: Any) -> None:
    assert hints_of(envelope(one), PROMPT) == ((), False, 1)


@pytest.mark.parametrize("whole", [[], "text", 5, {}, {"actions": None}, {"actions": "text"}, {"actions": 7}])
def test_what_is_no_envelope_says_nothing(whole: Any) -> None:
    assert hints_of(whole, PROMPT) == ((), False, 1)


def test_no_envelope_and_an_empty_one_say_nothing() -> None:
    assert hints_of(None, PROMPT) == hints_of(envelope(), PROMPT) == NO_HINTS


def test_more_than_a_call_may_carry_is_left_out() -> None:
    many = [action({"priority": 50})] * (MAX_ACTIONS + 3)
    assert hints_of(envelope(*many), PROMPT)[1:] == (False, 3)
    ranges = [{"start": n, "end": n + 1, "priority": 50} for n in range(MAX_RANGES)]
    full = action({"directives": ranges})
    found = hints_of(envelope(full, action({"priority": 1})), PROMPT)
    assert (len(found.retention), found.num_ignored) == (MAX_RANGES, 1)
    assert hints_of(envelope(action({"directives": [*ranges, {"priority": 1}]})), PROMPT).num_ignored == 1
