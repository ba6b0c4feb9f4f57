"""Audits of the catalog and of the sums over it, for tests and `doctor`. They look at every fragment."""

from collections import Counter
from collections.abc import Iterable

from ....tiers.block import NO_PLACE
from ....tiers.cold.log import record_bytes
from ....v1.shm import extent_of
from .catalog import Catalog
from .core_state import CoreState
from .states import State


def check_catalog(catalog: Catalog) -> list[str]:
    """Audit the tree and every per-block count against the fragments."""
    problems = []
    num_blocks = 0
    for namespace in catalog.namespaces.values():
        for prefix_hash, row in namespace.rows.items():
            num_blocks += 1
            if catalog.prefix_hash[row] != prefix_hash or catalog.namespace_id[row] != namespace.id:
                problems.append(f"row {row}: hash or namespace differs from the table's")
            problems += _check_row(catalog, row)
    if num_blocks != catalog.num_blocks:
        problems.append(f"num_blocks {catalog.num_blocks} != rows in tables {num_blocks}")
    return problems


def _check_row(catalog: Catalog, row: int) -> list[str]:
    problems = []
    children = catalog.children(row)
    for child in children:
        if catalog.parent[child] != row:
            problems.append(f"row {child}: is a child of {row} but its parent is {catalog.parent[child]}")
    for tier in catalog.ladder.tiers:
        states = [catalog.state[tier][f] for f in catalog.fragments(row)]
        counts = {
            "num_placed": (catalog.num_placed, sum(s != State.ABSENT for s in states)),
            "num_resident": (catalog.num_resident, states.count(State.RESIDENT)),
            "num_holds": (catalog.num_holds, sum(catalog.holds[tier][f] for f in catalog.fragments(row))),
            "num_children_placed": (
                catalog.num_children_placed,
                sum(catalog.num_placed[tier][child] > 0 for child in children),
            ),
        }
        for name, (columns, truth) in counts.items():
            if columns[tier][row] != truth:
                problems.append(f"row {row} {tier.label}: {name} {columns[tier][row]} != {truth}")
        for fragment in catalog.fragments(row):
            absent = catalog.state[tier][fragment] == State.ABSENT
            if absent != (catalog.place[tier][fragment] == NO_PLACE):
                problems.append(f"fragment {fragment} {tier.label}: state and place disagree")
            if absent and catalog.holds[tier][fragment]:
                problems.append(f"fragment {fragment} {tier.label}: held but absent")
    return problems


def check_books(core: CoreState, forwards: Iterable[tuple[int, int]]) -> list[str]:
    """Audit invariant 15: bytes by tier and state and by namespace, places, records by segment.
    `forwards`: (place, bytes) of records being copied forward."""
    catalog, transitions, log_tier = core.catalog, core.transitions, core.ladder.log_tier
    problems = []
    taken = set()
    by_state: Counter[tuple[State, int]] = Counter()
    in_log: Counter[int] = Counter()  # bytes, by namespace
    records = list(forwards)
    for namespace in catalog.namespaces.values():
        for fragment in (f for row in namespace.rows.values() for f in catalog.fragments(row)):
            for tier in core.ladder.tiers:
                place = catalog.place[tier][fragment]
                if place == NO_PLACE:
                    continue
                length = catalog.stored_length(fragment, tier)
                by_state[State(catalog.state[tier][fragment]), tier] += length
                if (tier, place) in taken:
                    problems.append(f"{tier.label}: place {place:#x} belongs to two fragments")
                taken.add((tier, place))
                if tier == log_tier:
                    in_log[namespace.id] += length
                    records.append((place, length))
    for state, sums in (
        (State.ARRIVING, transitions.arriving_bytes),
        (State.RESIDENT, transitions.resident_bytes),
        (State.CONDEMNED, transitions.condemned_bytes),
    ):
        for tier in core.ladder.tiers:
            if sums[tier] != by_state[state, tier]:
                problems.append(f"{tier.label}: {state.name} {sums[tier]} != sum {by_state[state, tier]}")
    for number in catalog.namespaces:
        if transitions.cold_bytes[number] != in_log[number]:
            problems.append(f"namespace {number}: {transitions.cold_bytes[number]} cold, {in_log[number]}")
    num_live = Counter(extent_of(place) for place, _ in records)
    live_bytes: Counter[int] = Counter()
    for place, length in records:
        live_bytes[extent_of(place)] += record_bytes(length)
    for number, segment in enumerate(core.log.segments if core.log is not None else ()):
        if (segment.num_live, segment.live_bytes) != (num_live[number], live_bytes[number]):
            problems.append(
                f"segment {number}: {segment.num_live} live records of {segment.live_bytes} bytes, "
                f"the catalog has {num_live[number]} of {live_bytes[number]}"
            )
    return problems
