"""Trials: the first export to a source of unknown speed says whether others are worth it."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity.exports import RETRY_S, SPEED_TRUST_S
from kvtier.appliance.core.copying.source_speed import TRUST_S

from ..rig import hashes
from .exporting import BUNDLE_BYTES, SIZE, Exporting, stated, ticked


def read_once(num_chains: int) -> Exporting:
    """Return a rig of known prefill in which chains of a bundle were used, over a source of unknown speed."""
    rig = Exporting()
    stated(rig, 1000.0)
    for number in range(num_chains):
        rig.put(hashes(f"{number}", SIZE))
        rig.read(hashes(f"{number}", SIZE))
    return rig


def ended_trial(rig: Exporting, read_s: float) -> None:
    """End the one export that is under way."""
    trial = rig.exports[-1]
    assert trial.is_trial
    rig.do(ev.ExportFinished(trial.export, True, BUNDLE_BYTES, read_s))
    rig.now += RETRY_S
    rig.do(ev.Tick())


@pytest.mark.parametrize("is_slow", [True, False])
def test_one_export_tells_how_fast_the_source_is_before_others_begin(is_slow: bool) -> None:
    rig = read_once(3)
    assert [one.is_trial for one in rig.exports] == [True], "the others wait for it"
    assert not rig.planner.is_busy
    compute_s = rig.planner.costs.recompute_s(rig.namespace_id, 0, SIZE)
    ended_trial(rig, compute_s if is_slow else compute_s / 2)
    assert [one.is_trial for one in rig.exports[1:]] == ([] if is_slow else [False] * 2)
    assert rig.planner.story.counters.get("exports_not_worth", 0) == (2 if is_slow else 0)
    if is_slow:  # for an hour, and not only while fetches are expected by it
        rig.now += TRUST_S + 1
        rig.put(hashes("soon", SIZE))
        rig.read(hashes("soon", SIZE))
        assert len(rig.exports) == 1
    for export in rig.exports[1:]:
        rig.stored(export)
    rig.now += SPEED_TRUST_S + 1
    rig.put(hashes("later", SIZE))
    rig.read(hashes("later", SIZE))
    assert rig.exports[-1].is_trial


def test_a_trial_that_tells_nothing_is_not_repeated_for_an_hour() -> None:
    rig = read_once(3)
    ended_trial(rig, 0.0)
    assert [one.is_trial for one in rig.exports] == [True, False, False]


def test_a_trial_that_fails_is_followed_by_another_one() -> None:
    rig = read_once(2)
    rig.stored(rig.exports[0], is_stored=False)
    rig.now += RETRY_S
    rig.do(ev.Tick())
    assert [one.is_trial for one in rig.exports] == [True, True]
    ended_trial(rig, 1e-3)
    assert [one.is_trial for one in rig.exports] == [True, True, False]


def test_a_trial_holds_back_only_what_waits_for_its_answer() -> None:
    rig = read_once(2)
    rig.do(ev.DrainStarted(rig.call()))
    ticked(rig)
    assert [one.is_trial for one in rig.exports] == [True, False], "what a drain stores is not compared"


def test_a_known_speed_needs_no_trial() -> None:
    rig = Exporting()
    stated(rig, 1000.0)
    rig.planner.source_index.store_speed.tried(BUNDLE_BYTES, 1e-3, rig.now)
    rig.put(hashes("a", SIZE))
    rig.read(hashes("a", SIZE))
    assert [one.is_trial for one in rig.exports] == [False]
