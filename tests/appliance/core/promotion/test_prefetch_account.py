"""PrefetchAccount: a source that was wrong pauses, one that is right goes on, the wasted share is bounded."""

import math
from random import Random

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.promotion.prefetch_account import (
    HALF_LIFE_S,
    MAX_WASTED,
    TRIAL_SHARE,
    PrefetchAccount,
)
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.block import Tier, Urgency

from ..rig import CLIENT, GEOMETRY, Rig

CAPACITY = 1 << 30
BLOCK = 1 << 20


def play(share_right: float, seed: int, num_rounds: int = 400, round_s: float = 30.0) -> tuple[int, int]:
    """Let a source guess as much as it may, a quarter of the tier a round. Returns bytes used, wasted."""
    guesses, random = PrefetchAccount(), Random(seed)
    used = wasted = 0
    for number in range(num_rounds):
        now = number * round_s
        num_blocks = int(min(guesses.room_bytes(CAPACITY, now), CAPACITY / 4) // BLOCK)
        guesses.begin(num_blocks * BLOCK)
        for _ in range(num_blocks):
            is_right = random.random() < share_right
            used, wasted = used + is_right * BLOCK, wasted + (not is_right) * BLOCK
            guesses.end(BLOCK, is_right * BLOCK, (not is_right) * BLOCK, now + round_s)
    assert guesses.out_bytes == 0
    return used, wasted


def test_a_source_without_a_past_is_trusted() -> None:
    assert PrefetchAccount().room_bytes(CAPACITY, 0.0) == math.inf


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_is_right_is_not_bounded(seed: int) -> None:
    used, wasted = play(0.9, seed)
    assert used + wasted == 400 * (CAPACITY // 4 // BLOCK) * BLOCK


@pytest.mark.parametrize("share_right", [0.0, 0.3, 0.5, 0.65])
def test_a_source_that_is_wrong_wastes_its_first_trust_and_trials(share_right: float) -> None:
    used, wasted = play(share_right, seed=7)
    num_half_lives = 400 * 30.0 / HALF_LIFE_S
    debt = wasted - MAX_WASTED / (1 - MAX_WASTED) * used
    assert debt <= CAPACITY / 4 + (1 + 3 * num_half_lives) * TRIAL_SHARE * CAPACITY


def test_what_is_out_counts_before_its_end_is_known() -> None:
    guesses = PrefetchAccount()
    guesses.begin(2 * BLOCK)
    guesses.end(2 * BLOCK, BLOCK, BLOCK, 0.0)
    room_bytes = guesses.room_bytes(CAPACITY, 0.0)
    assert 0 < room_bytes < math.inf
    guesses.begin(BLOCK)
    assert guesses.room_bytes(CAPACITY, 0.0) == pytest.approx(room_bytes - BLOCK)
    guesses.begin(int(room_bytes))
    assert guesses.room_bytes(CAPACITY, 0.0) == 0.0


def test_a_debt_is_forgotten() -> None:
    guesses = PrefetchAccount()
    guesses.begin(100 * BLOCK)
    guesses.end(100 * BLOCK, 0, 100 * BLOCK, 0.0)
    assert guesses.room_bytes(CAPACITY, 0.0) == 0.0
    assert guesses.room_bytes(CAPACITY, 10 * HALF_LIFE_S) > 0.0


def cold(num_blocks: int, **options: object) -> tuple[Rig, list[bytes]]:
    """Return a rig and a chain of session `s` that is in nvme only."""
    rig = Rig(8, 8, 8, policies=PolicyChoice(prefetch="announced"), **options)  # type: ignore[arg-type]
    return rig, rig.cool_new("a", num_blocks, session_id="s")


def wait(rig: Rig, seconds: float) -> None:
    """Let time pass, with copies that end at once."""
    end = rig.now + seconds
    while rig.now < end:
        rig.tick(min(0.05, end - rig.now))
        rig.settle()


def test_of_a_chain_that_cannot_fit_its_beginning_comes_up_and_no_more() -> None:
    rig, chain = cold(6, max_prefetched_fraction=0.5)
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.WAITING, back_at=rig.now + 1.0))
    wait(rig, 1.5)
    assert [("dram" in rig.where(name)) for name in chain] == [True] * 4 + [False] * 2
    assert rig.planner.story.counters["prefetch_unfit"] == 2


def test_a_source_in_debt_begins_nothing() -> None:
    rig, _ = cold(4, max_prefetched_fraction=1.0)
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.WAITING, back_at=rig.now + 1.0))
    wait(rig, 30.0)
    assert rig.planner.story.counters["prefetch_wasted"] == 4
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.WAITING, back_at=rig.now + 1.0))
    wait(rig, 30.0)
    assert rig.planner.story.counters["prefetch_begun"] == 4


def test_what_has_not_begun_when_its_session_is_served_is_left_to_the_request() -> None:
    rig, chain = cold(4, max_prefetched_fraction=1.0, max_prefetch_bytes=GEOMETRY.block_bytes)
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.IDLE))
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.QUEUED))
    assert len(rig.copies) == 2  # the fragments of one block, the others wait for their turn
    call = rig.acquire(chain, session_id="s")
    rig.settle()
    assert rig.answer(call).num_blocks == 4
    rig.release(call)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    wait(rig, 10.0)
    assert not any("dram" in rig.where(name) for name in chain), "brought up behind its back"
    assert rig.planner.story.counters["prefetch_begun"] == 1
