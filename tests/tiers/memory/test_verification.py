"""Verification of slots: every flipped byte of a payload or header is found; slots in use are not judged."""

import random

from kvtier.tiers.base import Cause, Damaged
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.v1.shm import SLOT_HEADER, extent_of, slot_of
from tests.tiers.helpers import EXTENT_BYTES, drop, make_label, open_engine, store

LENGTH = 40_000


def found_in(engine: ExtentEngine) -> list[Damaged]:
    verifier = engine.verifier
    steps = [step for number in verifier.units() for step in verifier.verify_unit(number)]
    return [one for step in steps for one in step.damaged if verifier.is_alive(one)]


def test_every_flipped_byte_is_found_and_no_other_slot() -> None:
    """Also one that makes a header say that its slot is empty."""
    dice = random.Random(17)
    with open_engine(num_extents=2) as (engine, room, _):
        places = [store(engine, room, make_label(n, LENGTH), n) for n in range(90)]
        assert found_in(engine) == []
        headers = {extent: engine._extents[extent].headers for extent in (0, 1)}
        rotten = {}
        for place in dice.sample(places, 20):
            kind = dice.choice(["payload", "header", "generation"])
            if kind == "payload":
                view = engine.view(place, LENGTH)
                rotten[place], at = Cause.WRONG_CHECKSUM, dice.randrange(LENGTH)
            else:
                view, start = headers[extent_of(place)]._bytes, slot_of(place) * SLOT_HEADER.itemsize
                at = start + (0 if kind == "generation" else dice.randrange(8, SLOT_HEADER.itemsize))
                rotten[place] = Cause.WRONG_IDENTITY
            view[at] ^= 1
        assert {one.place: one.cause for one in found_in(engine)} == rotten
        for place in rotten:  # for the audit
            engine._extents[extent_of(place)].headers._words[slot_of(place) * SLOT_HEADER.itemsize // 8] |= 1
            engine._published.pop(place)


def test_a_slot_that_was_filled_again_is_not_judged() -> None:
    with open_engine() as (engine, room, _):
        place = store(engine, room, make_label(1, LENGTH), 1)
        engine.view(place, LENGTH)[7] ^= 1
        [one] = found_in(engine)
        drop(engine, room, place, LENGTH)
        assert not engine.verifier.is_alive(one)
        assert store(engine, room, make_label(2, LENGTH), 2) == place
        assert not engine.verifier.is_alive(one)
        assert found_in(engine) == []


def test_an_extent_that_is_given_back_ends_its_verification() -> None:
    with open_engine(num_extents=2) as (engine, room, _):
        numbers = [store(engine, room, make_label(n, EXTENT_BYTES), n) for n in range(2)]
        steps = engine.verifier.verify_unit(1)
        assert next(steps).num_fragments == 1
        drop(engine, room, numbers[1], EXTENT_BYTES)
        room.retire([1])
        room.take_gone()
        engine.give_back(1)
        assert list(steps) == []
        assert list(engine.verifier.verify_unit(1)) == []
