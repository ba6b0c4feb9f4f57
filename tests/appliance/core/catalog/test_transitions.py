"""The bulk transitions do what the scalar ones do, and refuse what those refuse.

Two catalogs get the same steps, one fragment at a time and in bulk. What is drawn is adversarial: branches in
the middle of chains, blocks half in one tier and half in another, condemned fragments, holds that outlive a
landing, rows that were used before, chains in an order that no planner would choose.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.appliance.core.catalog.catalog import NO_ROW, Catalog
from kvtier.appliance.core.catalog.catalog_audit import check_catalog
from kvtier.appliance.core.catalog.states import InvalidTransition, State, Step
from kvtier.appliance.core.catalog.transitions import TRANSITIONS, Transitions
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.planner import Planner
from kvtier.tiers.base import Room
from kvtier.tiers.block import Geometry, NamespaceIdentity, Tier
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.cold.recovery import RECORD, RecoveredStore, SegmentSummary
from kvtier.tiers.ladder import STANDARD
from kvtier.tiers.memory.slots import SlotPool
from tests.records import columns

MANY = settings(max_examples=150)
CHECKSUM = bytes(range(16))


class World:
    """A catalog with one namespace, and its transitions."""

    def __init__(self, num_groups: int) -> None:
        geometry = Geometry(num_groups, 1, 1, 16, "int8", num_planes=1, layers_per_group=1)
        self.catalog = Catalog()
        self.namespace = self.catalog.add_namespace(NamespaceIdentity(b"m" * 16, geometry), 0, 1)
        self.transitions = Transitions(self.catalog, lambda prefix_hash: [])
        self.next_place = 0

    def places(self, count: int) -> list[int]:
        """Return so many places that no fragment has."""
        self.next_place += count
        return list(range(self.next_place - count, self.next_place))

    def put(self, names: list[bytes], parent: int, *, in_bulk: bool) -> list[int]:
        """Create a run of blocks and reserve it in dram, kept once each. Returns the rows."""
        catalog, transitions, num_groups = self.catalog, self.transitions, self.namespace.num_groups
        places = self.places(len(names) * num_groups)
        if in_bulk:
            rows = catalog.add_run(self.namespace, names, parent, 1.0)
            transitions.reserve_run(rows, catalog.fragments_of(rows, num_groups), places)
            return rows
        rows = []
        for name in names:
            parent = catalog.add(self.namespace, name, parent, 1.0)
            rows.append(parent)
            transitions.keep(parent)
            for fragment in catalog.fragments(parent):
                transitions.reserve(fragment, Tier.DRAM, places.pop(0))
        return rows

    def land(self, rows: list[int], *, in_bulk: bool) -> None:
        """The bytes of a run arrive."""
        catalog, transitions = self.catalog, self.transitions
        fragments = catalog.fragments_of(rows, self.namespace.num_groups)
        if in_bulk:
            transitions.land_run(rows, fragments, [CHECKSUM] * len(fragments))
            return
        for fragment in fragments:
            label = catalog.label_of(fragment)
            label.checksum = CHECKSUM
            transitions.land(fragment, Tier.DRAM, label)
            transitions.drop(fragment, Tier.DRAM)

    def evict(self, rows: list[int], *, in_bulk: bool) -> tuple[int, list[int]]:
        """A run leaves dram, deepest first. Returns how many children its parent has left there (NO_ROW
        without one), and the places, sorted."""
        catalog, transitions, tier = self.catalog, self.transitions, Tier.DRAM
        if in_bulk:
            num_left = transitions.withdraw_run(rows, tier)
            return num_left, sorted(transitions.evict_run(rows, tier))
        places = [transitions.evict(f, tier).place for row in rows for f in catalog.fragments(row)]
        parent = catalog.parent[rows[-1]]
        return (catalog.num_children_placed[tier][parent] if parent != NO_ROW else NO_ROW), sorted(places)

    def snapshot(self) -> dict[str, Any]:
        """Return all that `Transitions` writes, blocks by name."""
        catalog, transitions = self.catalog, self.transitions
        blocks = {
            name: (
                catalog.num_keepers[row],
                catalog.prefix_hash[catalog.parent[row]] if catalog.parent[row] != NO_ROW else b"",
                [
                    (columns[tier][row])
                    for tier in STANDARD.tiers
                    for columns in (
                        catalog.num_placed,
                        catalog.num_resident,
                        catalog.num_holds,
                        catalog.num_children_placed,
                    )
                ],
                [
                    (columns[tier][fragment])
                    for fragment in catalog.fragments(row)
                    for tier in STANDARD.tiers
                    for columns in (catalog.place, catalog.state, catalog.holds)
                ],
                [
                    (catalog.encoding[f], catalog.checksum_low[f], catalog.checksum_high[f])
                    for f in catalog.fragments(row)
                ],
            )
            for name, row in self.namespace.rows.items()
        }
        fragment_names = {
            fragment: (name, fragment - catalog.first_fragment[row])
            for name, row in self.namespace.rows.items()
            for fragment in catalog.fragments(row)
        }
        listed = {
            number: sorted(fragment_names[f] for f in fragments)
            for number, fragments in transitions.in_segment.items()
        }
        sums = (
            transitions.arriving_bytes,
            transitions.resident_bytes,
            transitions.condemned_bytes,
            transitions.num_resident,
            dict(transitions.cold_bytes),
        )
        return {"blocks": blocks, "sums": sums, "segments": listed, "audit": check_catalog(catalog)}


def compare(scalar: World, bulk: World) -> None:
    found = bulk.snapshot()
    assert found == scalar.snapshot()
    assert found["audit"] == []


def disturb(worlds: tuple[World, World], data: st.DataObject, rows: list[int]) -> None:
    """Take the same valid scalar steps in both: holds, records in the cold store, condemned fragments."""
    place = worlds[0].next_place + 1_000_000
    for row in data.draw(st.lists(st.sampled_from(rows), max_size=4)):
        for fragment in worlds[0].catalog.fragments(row):
            tier = data.draw(st.sampled_from(STANDARD.tiers))
            state = State(worlds[0].catalog.state[tier][fragment])
            steps = [step for before, step in TRANSITIONS if before is state]
            if tier is Tier.DRAM:  # what is there is the subject of the test, and stays as it is
                steps = []
            step = data.draw(st.sampled_from(steps)) if steps else None
            place += 1
            for world in worlds:
                if step is not None:
                    _take(world, fragment, tier, step, place)


def _take(world: World, fragment: int, tier: Tier, step: Step, place: int) -> None:
    transitions = world.transitions
    if step is Step.RESERVE:
        transitions.reserve(fragment, tier, place)
    elif step is Step.LAND:
        transitions.land(fragment, tier, world.catalog.label_of(fragment))
        transitions.drop(fragment, tier)
    elif step is Step.FAIL:
        transitions.fail(fragment, tier)
    elif step is Step.EVICT:
        transitions.evict(fragment, tier)
    elif step is Step.CONDEMN:
        transitions.condemn(fragment, tier)
    else:
        transitions.quiet(fragment, tier)


def names_of(number: int, count: int) -> list[bytes]:
    """Return prefix hashes that no other put has."""
    return [(number * 1000 + index).to_bytes(4, "little") * 8 for index in range(count)]


@MANY
@given(st.data())
def test_bulk_steps_are_the_scalar_ones(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 3))
    scalar, bulk = worlds = World(num_groups), World(num_groups)
    runs: list[list[int]] = []
    for number in range(data.draw(st.integers(1, 5))):
        known = [row for run in runs for row in run]
        parent = data.draw(st.sampled_from([NO_ROW, *known]))
        names = names_of(number, data.draw(st.integers(1, 6)))
        rows = scalar.put(names, parent, in_bulk=False)
        assert bulk.put(names, parent, in_bulk=True) == rows, "rows are taken in the same order"
        runs.append(rows)
        compare(scalar, bulk)
        disturb(worlds, data, rows)
        scalar.land(rows, in_bulk=False)
        bulk.land(rows, in_bulk=True)
        compare(scalar, bulk)
    known = [row for run in runs for row in run]
    _hold_and_drop(scalar, bulk, data.draw(st.lists(st.sampled_from(known), max_size=6)))
    _unkeep(scalar, bulk, data.draw(st.permutations(known)), data.draw(st.lists(st.sampled_from(known))))
    disturb(worlds, data, known)
    for _ in range(len(runs)):
        rows = _a_leaving_run(scalar.catalog, known, data)
        if rows:
            assert scalar.evict(rows, in_bulk=False) == bulk.evict(rows, in_bulk=True)
            compare(scalar, bulk)


def _hold_and_drop(scalar: World, bulk: World, rows: list[int]) -> None:
    for row in rows:
        fragments = scalar.catalog.fragments(row)
        for fragment in fragments:
            scalar.transitions.hold(fragment, Tier.DRAM)
        bulk.transitions.hold_block(row, fragments, Tier.DRAM)
    compare(scalar, bulk)
    for row in rows:
        fragments = scalar.catalog.fragments(row)
        for fragment in fragments:
            scalar.transitions.drop(fragment, Tier.DRAM)
        num_left = bulk.transitions.drop_block(row, fragments, Tier.DRAM)
        assert num_left == scalar.catalog.num_holds[Tier.DRAM][row]
    compare(scalar, bulk)


def _unkeep(scalar: World, bulk: World, rows: list[int], again: list[int]) -> None:
    """Undo the keeps of all rows, and of some that were kept more often, in any order."""
    for world in (scalar, bulk):
        for row in again:
            world.transitions.keep(row)
    wanted: Counter[int] = Counter()
    for row in [*again, *rows]:
        if scalar.transitions.unkeep(row) == 0:
            wanted[row] += 1
    free, nowhere = bulk.transitions.unkeep_run([*again, *rows])
    compare(scalar, bulk)
    below = scalar.catalog.num_children_placed[Tier.DRAM]
    in_hbm = scalar.catalog.num_placed[Tier.HBM]
    assert nowhere == [], "all of them are in dram"
    assert Counter(free) == Counter(row for row in wanted if not below[row] or in_hbm[row])


def _a_leaving_run(catalog: Catalog, rows: list[int], data: st.DataObject) -> list[int]:
    """Return a block that nothing continues in dram, and some of those above it that only it continues."""
    tier = Tier.DRAM
    children, complete = catalog.num_children_placed[tier], catalog.num_resident[tier]
    num_groups = catalog.namespace_of(rows[0]).num_groups
    leaves = [row for row in rows if complete[row] == num_groups and not children[row]]
    if not leaves:
        return []
    row = data.draw(st.sampled_from(leaves))
    run, limit = [row], data.draw(st.integers(1, 6))
    row = catalog.parent[row]
    while row != NO_ROW and len(run) < limit and children[row] == 1 and complete[row] == num_groups:
        run.append(row)
        row = catalog.parent[row]
    return run


@MANY
@given(st.data())
def test_both_refuse_a_step_that_the_table_does_not_have(data: st.DataObject) -> None:
    """Of a run, one fragment is in another state than the bulk step asks for, or is held."""
    num_groups, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    act = data.draw(st.sampled_from(["reserve", "land", "evict"]))
    start = {"reserve": State.ABSENT, "land": State.ARRIVING, "evict": State.RESIDENT}[act]
    other = data.draw(st.sampled_from([state for state in State if state is not start]))
    errors = []
    odd = data.draw(st.integers(0, num_groups * count - 1))
    for in_bulk in (False, True):
        world = World(num_groups)
        rows = world.put(names_of(0, count), NO_ROW, in_bulk=False)
        fragments = world.catalog.fragments_of(rows, num_groups)
        for fragment in fragments:
            _bring(world, fragment, other if fragment == fragments[odd] else start)
        with pytest.raises(InvalidTransition) as caught:
            _act(world, act, rows, in_bulk=in_bulk)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def _act(world: World, act: str, rows: list[int], *, in_bulk: bool) -> None:
    fragments = world.catalog.fragments_of(rows, world.namespace.num_groups)
    if act == "land":
        world.land(rows, in_bulk=in_bulk)
    elif act == "evict":
        world.evict(rows[::-1], in_bulk=in_bulk)
    elif in_bulk:
        world.transitions.reserve_run(rows, fragments, world.places(len(fragments)))
    else:
        for fragment in fragments:
            world.transitions.reserve(fragment, Tier.DRAM, world.places(1)[0])


def _bring(world: World, fragment: int, state: State) -> None:
    """Bring a fragment that is ARRIVING in dram into another state, without holds."""
    transitions, tier = world.transitions, Tier.DRAM
    if state is State.ARRIVING:
        return
    if state is State.ABSENT:
        transitions.fail(fragment, tier)
        return
    transitions.land(fragment, tier, world.catalog.label_of(fragment))
    transitions.drop(fragment, tier)
    if state is State.CONDEMNED:
        transitions.condemn(fragment, tier)


@pytest.mark.parametrize("in_bulk", [False, True])
def test_what_is_held_does_not_leave(in_bulk: bool) -> None:
    world = World(2)
    rows = world.put(names_of(0, 3), NO_ROW, in_bulk=in_bulk)
    world.land(rows, in_bulk=in_bulk)
    world.transitions.hold(world.catalog.fragments(rows[1])[1], Tier.DRAM)
    with pytest.raises(AssertionError, match="held"):
        world.evict(rows[::-1], in_bulk=in_bulk)


@pytest.mark.parametrize("in_bulk", [False, True])
def test_nothing_is_let_go_of_more_often_than_held(in_bulk: bool) -> None:
    world = World(2)
    row = world.put(names_of(0, 1), NO_ROW, in_bulk=in_bulk)[0]
    world.land([row], in_bulk=in_bulk)
    fragments, transitions = world.catalog.fragments(row), world.transitions
    with pytest.raises(AssertionError, match="more often"):
        _ = (
            transitions.drop_block(row, fragments, Tier.DRAM)
            if in_bulk
            else transitions.drop(fragments[0], Tier.DRAM)
        )
    assert transitions.unkeep(row) == 0
    with pytest.raises(AssertionError, match="more often"):
        _ = transitions.unkeep_run([row]) if in_bulk else transitions.unkeep(row)


@settings(max_examples=60)
@given(st.data())
def test_records_found_at_start_count_like_those_that_landed(data: st.DataObject) -> None:
    """A tree of blocks, some of them without some of their fragments, over several segments."""
    num_groups = data.draw(st.integers(1, 3))
    scalar = World(num_groups)
    names = names_of(0, data.draw(st.integers(1, 8)))
    parents = [data.draw(st.sampled_from([b"", *names[:number]])) for number in range(len(names))]
    place, records, live = 0, [], Counter[int]()
    for name, parent in zip(names, parents, strict=True):
        parent_row = scalar.namespace.rows.get(parent, NO_ROW) if parent else NO_ROW
        row = scalar.catalog.add(scalar.namespace, name, parent_row, 0.0)
        groups = data.draw(st.sets(st.integers(0, num_groups - 1), min_size=1))
        for group in sorted(groups):
            segment, place = data.draw(st.integers(0, 3)), place + 1
            where, fragment = segment << 32 | place, scalar.catalog.first_fragment[row] + group
            live[segment] += 1
            scalar.transitions.reserve(fragment, Tier.NVME, where)
            label = scalar.catalog.label_of(fragment)
            label.checksum = CHECKSUM
            scalar.transitions.land(fragment, Tier.NVME, label)
            scalar.transitions.drop(fragment, Tier.NVME)
            length = scalar.namespace.fragment_bytes[group]
            position = scalar.catalog.position[row]
            records.append(
                (0, name, parent.ljust(32, b"\0"), bool(parent), position, group, where, length, length,
                 CHECKSUM, 0, False)
            )  # fmt: skip
    rooms: dict[Tier, Room] = {Tier.DRAM: SlotPool(1, 1 << 20), Tier.NVME: SegmentLog(4, 1 << 20, 4096)}
    planner = Planner(PlannerOptions(), rooms)
    found = np.array(data.draw(st.permutations(records)), RECORD)
    segments = [SegmentSummary(number, 64, count, 8192 * count) for number, count in live.items()]
    planner.adopt(RecoveredStore([scalar.namespace.identity], columns(found), segments), 0.0)
    bulk = World(num_groups)
    bulk.catalog, bulk.transitions = planner.catalog, planner.core.transitions
    bulk.namespace = planner.catalog.namespaces[1]
    compare(scalar, bulk)
