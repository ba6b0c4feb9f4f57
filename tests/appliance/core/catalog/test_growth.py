"""Columns have one length and get more memory one after the other: all at once is a pause."""

from array import array
from collections.abc import Iterator

from kvtier.appliance.core.catalog.catalog import GROWTH, NO_ROW, Catalog
from kvtier.appliance.core.catalog.columns import RENEWED_FROM
from kvtier.tiers.block import Geometry, NamespaceIdentity

GEOMETRY = Geometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16, dtype="int8", num_planes=1)


def columns(catalog: Catalog) -> "Iterator[array[int]]":
    """Yield every column of the catalog."""
    for name in dir(catalog):  # compiled classes have no vars()
        value = getattr(catalog, name)
        for column in value if isinstance(value, list) else [value]:
            if isinstance(column, array):
                yield column


def sizes_of(catalog: Catalog) -> list[int]:
    """Return the bytes of memory of each column."""
    return [column.__sizeof__() for column in columns(catalog)]


def test_no_step_moves_many_columns() -> None:
    catalog = Catalog()
    namespace = catalog.add_namespace(NamespaceIdentity(b"m" * 16, GEOMETRY), 0, 1)
    sizes: list[int] = []
    moved: list[float] = []  # parts of the bytes of all columns, by step
    for first in range(0, 4 * RENEWED_FROM, GROWTH):
        names = [number.to_bytes(32, "little") for number in range(first, first + GROWTH)]
        catalog.add_run(namespace, names, NO_ROW, 0.0)
        before, sizes = sizes, sizes_of(catalog)
        if first >= 2 * RENEWED_FROM:  # since when each had its turn
            moved.append(sum(b for a, b in zip(before, sizes, strict=True) if a != b) / sum(sizes))
    assert max(moved) < 0.35
    assert 0.03 < sum(moved) / len(moved) < 0.25, "each moves as often as it would alone"
    assert {len(column) for column in columns(catalog)} == {4 * RENEWED_FROM}


def test_after_recovery_not_all_columns_are_full_at_once() -> None:
    catalog = Catalog()
    namespace = catalog.add_namespace(NamespaceIdentity(b"m" * 16, GEOMETRY), 0, 1)
    catalog.add_run(namespace, [n.to_bytes(32, "little") for n in range(RENEWED_FROM)], NO_ROW, 0.0)
    for column in columns(catalog):  # to the brim, as a second namespace of a store may
        spare = (column.__sizeof__() - array("B").__sizeof__()) // column.itemsize - len(column)
        column.frombytes(bytes(spare * column.itemsize))
    catalog.fit_columns()
    before = sizes_of(catalog)
    for column in columns(catalog):
        column.frombytes(bytes(GROWTH * column.itemsize))
    assert sizes_of(catalog) == before
