"""Prefill here, decode there: what one engine says of a prompt, and what the other one makes of it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvtier.clients import ExpectedBlocks
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.scheduler.handover import HandoverSource, source_of, told_of

from .engine import Request
from .scheduler_scene import GROUPS, PENDING, WINDOWED, Scene, hit, request

EPOCH, DIGEST = 0x7FFF_0000_1111_2223, bytes(range(32))
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def told(num_tokens: int = 40, groups: list[Group] = GROUPS) -> dict[str, Any]:
    """Return what a prefill engine answers for a prompt, as it comes out of a proxy."""
    one = replace(request(num_tokens), kv_transfer_params=ASKED)
    answer = told_of(one, groups, lambda: (EPOCH, DIGEST), num_tokens)
    found: dict[str, Any] = json.loads(json.dumps(answer))
    return found


def decode(params: Any, num_tokens: int = 40) -> Request:
    """Return a decode engine's request."""
    return replace(request(num_tokens), kv_transfer_params=params)


@pytest.mark.parametrize("groups", [GROUPS, WINDOWED])
def test_decode_learns_where_the_whole_blocks_of_the_prompt_are(groups: list[Group]) -> None:
    source, is_refused = source_of(decode(told(43, groups), 43), groups)
    assert (source, is_refused) == (HandoverSource("", EPOCH, 40, DIGEST.hex()[:32]), False)
    assert source is not None
    assert source.is_of(DIGEST)
    assert not source.is_of(bytes(32))


def test_who_did_not_ask_is_told_nothing() -> None:
    def nowhere() -> None:
        return None

    for params in (None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}, "x"):
        assert told_of(decode(params), GROUPS, lambda: (EPOCH, DIGEST), 40) is None
    assert told_of(decode(ASKED), GROUPS, nowhere, 40) is None, "the daemon does not answer"
    assert told_of(decode(ASKED), GROUPS, lambda: (EPOCH, DIGEST), 7) is None, "no whole block"


def test_a_proxy_that_asks_both_at_once_names_the_host_alone() -> None:
    source, is_refused = source_of(decode({"kvtier_source": {"host": "10.0.0.1:7070"}}, 43), GROUPS)
    assert (source, is_refused) == (HandoverSource("10.0.0.1:7070", 0, 40, ""), False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": "00" * 32},
        {"num_tokens": 48},
        {"num_tokens": 12},
        {"num_tokens": 0},
        {"num_tokens": "40"},
        {"epoch": 5},
        {"epoch": "xyz"},
        {"epoch": "0"},
        {"epoch": "f" * 17},
        {"host": 5},
        {"namespace": 5},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_not_followed(wrong: dict[str, Any]) -> None:
    params = told()
    params["kvtier_source"] |= wrong
    assert source_of(decode(params), GROUPS) == (None, True)
    assert source_of(decode({"kvtier_source": "x"}), GROUPS) == (None, True)
    assert source_of(decode(None), GROUPS) == (None, False)


def test_numbers_of_a_proxy_that_knows_only_floats_are_understood() -> None:
    params = told()
    params["kvtier_source"]["num_tokens"] = 40.0
    source, _ = source_of(decode(params), GROUPS)
    assert source is not None
    assert source.num_tokens == 40


def test_what_nixl_was_given_is_nixls() -> None:
    params = {**told(), "do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]]}
    assert source_of(decode(params), GROUPS) == (None, True)


def test_decode_waits_for_it_once_and_loads_early() -> None:
    scene = Scene(handover_wait_s=7.0)
    one = decode(told())
    scene.side.arrived(one)
    question = scene.agent.asked[0].question
    assert (question.source, question.deadline_s) == (HandoverSource("", EPOCH, 40, DIGEST.hex()[:32]), 7.0)
    asked = scene.agent.asked[0]
    asked.is_pinned = True
    assert scene.side.matched_tokens(one, 0) == PENDING
    asked.arriving = replace(hit(40), stored=(1,))  # one block is there, four are being computed
    assert scene.side.matched_tokens(one, 0) == (40, True)
    scene.side.allocated(one, ([1, 2, 3, 4, 5],), 40)
    (load,) = scene.plan(one, 0, [1, 2, 3, 4, 5]).loads
    assert load.expected == ExpectedBlocks("", EPOCH, 0, 7.0)
    scene.side.loaded([one.request_id], [one.request_id])  # prefill died
    assert scene.side.matched_tokens(one, 0) == PENDING
    assert scene.agent.asked[1].question.source is None, "what did not come is computed"
    assert scene.counters.take()["handovers"] == 1


def test_what_was_handed_over_is_not_saved_again() -> None:
    scene = Scene()
    one = decode(told())
    scene.side.arrived(one)
    scene.agent.asked[0].is_pinned = True
    scene.agent.asked[0].arriving = replace(hit(40), stored=(1,))
    scene.side.matched_tokens(one, 0)
    scene.side.allocated(one, ([1, 2, 3, 4, 5],), 40)
    scene.plan(one, 0, [1, 2, 3, 4, 5])
    scene.side.loaded([one.request_id], [])
    one.num_computed_tokens = 39
    assert scene.plan(one, 1, [1, 2, 3, 4, 5]).saves == []


def test_the_end_of_prefill_tells_of_what_was_computed() -> None:
    scene = Scene()
    one = replace(request(43), kv_transfer_params=ASKED, num_computed_tokens=43)
    scene.side.arrived(one)
    found = scene.side.finished(one, ([1, 2, 3, 4, 5, 6],))
    assert found is not None
    assert found["kvtier_source"]["num_tokens"] == 40
    private = replace(one, request_id="p", kv_transfer_params={**ASKED, "kvtier_save": False})
    scene.side.arrived(private)
    assert scene.side.finished(private, ([1, 2, 3, 4, 5, 6],)) is None, "nothing of it is stored"


def test_under_multiconnector_it_has_keys_of_its_own() -> None:
    nixl = {"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_host"}
    assert not nixl & set(told())


def test_the_wait_is_a_setting() -> None:
    assert Options.from_config({"handover_wait_s": 3}, {}).handover_wait_s == 3
