"""Audits of the catalog, for tests and `doctor`."""

from ....tiers.block import NO_PLACE
from .catalog import Catalog
from .states import State


def check_catalog(catalog: Catalog) -> list[str]:
    """Audit the tree and every per-block count against the fragments. O(everything)."""
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
