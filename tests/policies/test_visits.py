"""Visits: which turn it is, what is shared, and what of that a price may depend on."""

import math

import numpy as np
import pytest

from kvtier.policies.urgency.ages import bin_of
from kvtier.policies.urgency.visits import (
    FIRST,
    FORK,
    LINES,
    NEW,
    NEXT,
    PRIVATE,
    PUBLIC,
    SHARED_UP_TO,
    SIZES,
    Visit,
    features_of,
    gap_bins_of,
    kind_of,
)
from kvtier.tiers.block import Urgency


def talk(*gaps_s: float) -> Visit:
    """Return the last visit of a conversation with these gaps between its turns."""
    visit = Visit(0.0, 0, 9, num_blocks=10, num_known=0)
    for gap_s in gaps_s:
        following = Visit(visit.used_at + gap_s, 0, 9, visit.num_blocks + 3, visit.num_blocks)
        following.follow(visit)
        visit = following
    return visit


def test_a_conversation_counts_its_turns_and_remembers_its_gaps() -> None:
    visit = talk(4.0, 16.0, 64.0)
    assert (visit.turn, visit.last_gap_s) == (3, 64.0)
    assert visit.mean_log_gap == pytest.approx((0.6 * 2 + 0.4 * 4) * 0.6 + 0.4 * 6)
    assert visit.num_new == 3


def test_stages() -> None:
    assert [talk(*[1.0] * turns).stage for turns in range(6)] == [FIRST, NEXT, 2, 3, 3, 3]
    assert Visit(0.0, 0, 9, 10, num_known=5).stage == FORK
    assert Visit(0.0, 0, 9, 10, num_known=1).stage == FIRST, "one block may be a coincidence"


def test_what_a_session_said_and_how_old_blocks_were_are_features() -> None:
    visit = talk(5.0)
    seen = set()
    for silence in (0, Urgency.WAITING, Urgency.IDLE):
        visit.silence = silence
        for age_s in (-1.0, 5.0, 500.0):
            seen.add(features_of(visit, PRIVATE, 1, age_s))
    visit.num_decoded_tokens = 400
    seen.add(features_of(visit, PRIVATE, 1, 5.0))
    assert len(seen) == 10


def test_nobody_s_last_conversation_matters_to_what_everybody_shares() -> None:
    one, other = talk(), talk(3.0, 900.0)
    other.silence, other.num_decoded_tokens = Urgency.IDLE, 500
    shared = {features_of(visit, PUBLIC, 9, 60.0)[:5] for visit in (one, other)}
    assert shared == {(0,) * 5}
    expected = (0, 0, 1 + bin_of(32.0), 0)
    assert gap_bins_of(one, PUBLIC, 5, 160.0) == gap_bins_of(other, PUBLIC, 5, 160.0) == expected


def test_an_age_is_compared_with_the_gaps_before_it() -> None:
    visit = talk(4.0, 64.0)
    visit.num_decoded_tokens = 1000  # half a minute
    mean_s = 2.0 ** (0.6 * 2 + 0.4 * 6)
    expected = (1 + bin_of(64.0), 1 + bin_of(mean_s), 1 + bin_of(34.0), 1 + bin_of(30.0))
    assert gap_bins_of(visit, PRIVATE, 2, 68.0) == expected
    assert gap_bins_of(talk(), NEW, 0, 0.0) == (0, 0, 0, 0), "nothing is known of it"
    assert gap_bins_of(talk(), PRIVATE + 1, 1, 0.0) == (0, 0, 0, 0), "used once, or restored"


def test_uses_are_told_apart_in_thirds_of_a_doubling_and_lie_on_a_line_up_to_eight() -> None:
    visit = talk(5.0)
    told = [features_of(visit, PRIVATE, num_uses, 5.0)[6] for num_uses in (1, 2, 3, 4, 6, 8, 10**9)]
    assert np.diff(told).min() > 0
    first = sum(SIZES[:6])
    places = [LINES[6][value - first] for value in told]
    assert places[1] - places[0] == pytest.approx(1.0), "a doubling is a step"
    assert places[3] - places[0] == pytest.approx(2.0)
    assert places[-2] == places[-1] == 3.0


def test_kinds_follow_the_number_of_forks() -> None:
    assert kind_of(0) == PRIVATE
    assert [kind_of(n) for n in (1, 2, 3, 4, 15, 16, 10_000)] == [3, 4, 4, 5, 6, 7, 7]
    assert math.isinf(SHARED_UP_TO[-1])


def test_a_next_turn_begins_with_all_of_the_last_one_but_a_partial_block() -> None:
    last = Visit(0.0, 0, 9, num_blocks=10, num_known=0)
    assert Visit(5.0, 0, 9, 12, 10).continues(last, 10)
    assert Visit(5.0, 0, 9, 12, 9).continues(last, 9)
    assert not Visit(5.0, 0, 9, 12, 8).continues(last, 8)
    assert not Visit(5.0, 0, 0, 2, 1).continues(Visit(0.0, 0, 0, 2, 0), 1), "one block is no conversation"
