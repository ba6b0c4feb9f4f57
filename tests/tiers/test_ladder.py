"""The ladder says which tiers there can be and which roles they have; a wrong one is refused in words."""

import copy

import pytest

from kvtier.tiers.block import Tier
from kvtier.tiers.ladder import ON_DEVICE, STANDARD, Ladder, TierSpec
from kvtier.v1.types import TierKind

DEVICE, LOG = TierSpec("gpu", TierKind.DEVICE), TierSpec("disk", TierKind.SEGMENTS)
FAST = TierSpec("fast", TierKind.MEMORY, takes_puts=True, readable_in_place=True)
FAR = TierSpec("far", TierKind.MEMORY, readable_in_place=True)


def test_roles_follow_from_the_specs() -> None:
    ladder = Ladder((DEVICE, FAST, FAR, LOG))
    assert [tier.label for tier in ladder.tiers] == ["gpu", "fast", "far", "disk"]
    assert (ladder.device_tier, ladder.put_tier, ladder.log_tier) == (0, 1, 3)
    assert ladder.memory_tiers == (0, 1, 2)
    assert ladder.tiers_in_place == (1, 2)
    assert ladder.above(ladder.put_tier) == (0,)
    assert ladder.below(ladder.put_tier) == (2, 3)
    assert ladder.specs[ladder.named("far")] == FAR


def test_a_tier_is_one_object_for_each_position_and_name() -> None:
    assert Tier(1, "dram") is Tier.DRAM
    assert Tier(1, "fast") is not Tier.DRAM
    assert copy.deepcopy(Tier(2, "far")) is Tier(2, "far")  # also what a copy in another process is made from
    assert Tier.DRAM.label == "dram"


def test_the_standard_ladder_has_three_tiers() -> None:
    assert [spec.name for spec in STANDARD.specs] == ["hbm", "dram", "nvme"]
    assert STANDARD.tiers_in_place == STANDARD.memory_tiers
    assert ON_DEVICE.tiers_in_place == (STANDARD.put_tier,)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ((DEVICE, FAST, FAST, LOG), "one name"),
        ((FAST, LOG), "begins with a device"),
        ((DEVICE, FAST, FAR), "ends with a log"),
        ((DEVICE, FAST, TierSpec("second", TierKind.SEGMENTS), LOG), "kind memory"),
        ((DEVICE, FAR, LOG), "takes puts"),
    ],
)
def test_a_wrong_ladder_is_refused(specs: tuple[TierSpec, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ladder(specs)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no tier 'cxl'; there are hbm, dram, nvme"):
        STANDARD.named("cxl")
