"""Announced returns that are kept or not, and what of them outlives a restart."""

import json
from typing import Any

import pytest

from kvtier.appliance.core.catalog.catalog import Catalog
from kvtier.policies.costs import CostModel
from kvtier.policies.learned import pack, unpack
from kvtier.policies.prefetch.promises import NAME, KeptPromises
from kvtier.policies.registry import PolicyChoice, build
from kvtier.tiers.block import Tier


def test_announcements_are_believed_until_they_are_broken() -> None:
    promises = KeptPromises()
    assert promises.ratio_at(0.5) == 1.0
    assert 0.5 < promises.ratio_at(0.1) < 1.0 < promises.ratio_at(0.9) < 2.0
    for _ in range(200):
        promises.kept(10.0, 40.0)
    assert promises.ratio_at(0.5) == pytest.approx(4.0, rel=0.2)
    for nonsense in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, 1e9), (1e9, 1.0)):
        promises.kept(*nonsense)
    assert promises.ratio_at(0.5) == pytest.approx(4.0, rel=0.2)


def learned() -> KeptPromises:
    promises = KeptPromises()
    promises.kept(30.0, 60.0)
    return promises


def test_promises_outlive_a_restart() -> None:
    again = KeptPromises()
    again.load(json.loads(json.dumps(learned().dump())))
    assert again.dump() == learned().dump()
    assert again.ratio_at(0.9) == learned().ratio_at(0.9)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 0},
        {"counts": None},
        {"counts": []},
        {"counts": [0.0] * 33},
        {"counts": [float("nan")] * 33},
        {"counts": [-1.0] * 33},
        {"counts": ["1"] * 33},
    ],
)
def test_promises_take_nothing_of_what_makes_no_sense(damage: dict[str, object]) -> None:
    promises = learned()
    before = promises.dump()
    with pytest.raises(ValueError, match="start without"):
        promises.load({**before, **damage})
    assert promises.dump() == before


def test_prefetchers_of_one_planner_share_their_promises() -> None:
    """So that they are kept with everything else that was learned."""
    shared: dict[str, Any] = {}
    choice = PolicyChoice(prefetch="announced")
    built = build(choice, Catalog(), CostModel(3e9, 1e-4), {Tier.DRAM: 1 << 30}, None, shared)
    assert pack(built.shared)
    assert unpack(pack({NAME: learned()}), built.shared) == {}
    assert built.shared[NAME].dump() == learned().dump()
