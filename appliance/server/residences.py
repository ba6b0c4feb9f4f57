"""Residences: the tables from which clients look up without a call, one per isolation domain.

    a client asks for its domain's table -> made, filled from the catalog in stretches of STRETCH_S
    every step of the planner            -> blocks that changed are entered before its answers go out

None is made before a client asks, and until then nothing is noted: a daemon with clients that never look up
pays nothing. While a table is filled, and while an answer needs more than the catalog (a source that may
hold more, memory of an earlier daemon that is not verified, a tier that is offline), it tells clients to
ask where it does not know a block. One that is half full is retired, and the next one filled like the
first: a table that moves its own entries would have to do that between two lookups, or keep two of them
alike.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter

from ...tiers.memory.engine import ExtentEngine
from ...tiers.memory.memfd import SharedMemoryError
from ...tiers.memory.residence import NOT_HERE, ResidenceWriter
from ...v1.conversions import WireTiers
from ...v1.residence import ASK, NOWHERE, RESIDENCE_EXTENT, RETIRED, SOURCES
from ..appliance import Appliance
from ..core.catalog.catalog import NO_ROW, NamespaceEntry
from ..core.catalog.table import NUM_PARTS
from ..errors import error

log = logging.getLogger(__name__)

STRETCH_S = 0.002  # of filling, then the event loop does other things
MIN_LOG2_ENTRIES = 12
FILLED_AT_ONCE = 512  # blocks


class _Table:
    """The table of a domain, and how far it has come."""

    def __init__(
        self, domain: int, writer: ResidenceWriter, blocks: Iterator[tuple[NamespaceEntry, list[bytes]]]
    ) -> None:
        self.domain = domain
        self.writer = writer
        self.blocks = blocks  # those that are to be entered
        self.is_filled = False
        self.told: tuple[object, ...] = ()  # state and prices, as they were written last


class Residences:
    """Keeps the tables. Lives on the event loop."""

    def __init__(self, appliance: Appliance, epoch: int, tiers: WireTiers) -> None:
        self._appliance = appliance
        self._planner = appliance.planner
        self._catalog, self._core = self._planner.catalog, self._planner.core
        self._epoch = epoch
        numbers = tiers.pack(bytes(range(len(tiers.ladder))))
        self._numbers = numbers  # on the wire, by tier
        self._tables: dict[int, _Table] = {}
        self._in_memory = [
            (numbers[tier], self._catalog.num_resident[tier])
            for tier in self._core.ladder.memory_tiers
            if tier in self._core.rooms
        ]

    def descriptor(self, domain: int) -> int:
        """Return the table of a domain, which stays this object's. Raises SharedMemoryError."""
        table = self._tables.get(domain)
        if table is None:
            if self._observe not in self._appliance.observers:
                self._core.transitions.take_changed()
                self._appliance.observers.append(self._observe)
            table = self._make(domain)
        return table.writer.descriptor

    def descriptor_of(self, number: int, domain: int) -> int:
        """Return what clients of a domain map by this number: one of its extents, or its table.

        Raises UnknownError, CopyError, SharedMemoryError.
        """
        if number == RESIDENCE_EXTENT:
            return self.descriptor(domain)
        memories = [one for one in self._appliance.engines.values() if isinstance(one, ExtentEngine)]
        for engine in memories:
            if engine.owns(number) and engine.domain_of(number) == domain:
                return engine.descriptor(number)
        raise error("UNKNOWN_EXTENT", f"extent {number} is not one of this client's domain")

    def drop(self, domains: Iterable[int]) -> None:
        """Close the tables of domains that are given back."""
        for domain in domains:
            table = self._tables.pop(domain, None)
            if table is not None:
                table.writer.set_state(RETIRED)
                table.writer.close()

    def check_integrity(self) -> list[str]:
        """Audit: each table that is filled says of every block what the catalog says."""
        problems = []
        for domain, table in self._tables.items():
            problems += table.writer.check_integrity()
            entries = [one for one in self._catalog.namespaces.values() if one.domain == domain]
            rows = [row for one in entries for row in one.rows.values()]
            num_stored = sum(self._code(self._catalog.namespace_of(row), row) != NOT_HERE for row in rows)
            if table.is_filled and table.writer.num_entries + table.writer.num_dropped != num_stored:
                problems.append(f"residence: {table.writer.num_entries} entries, {num_stored} blocks")
        return problems

    def close(self) -> None:
        """Close all tables. Idempotent."""
        self.drop(list(self._tables))

    def _make(self, domain: int) -> _Table:
        """Make the table of a domain, in the place of the one there is, and begin to fill it."""
        num_blocks = sum(len(one.rows) for one in self._catalog.namespaces.values() if one.domain == domain)
        log2_entries = max(MIN_LOG2_ENTRIES, (3 * num_blocks).bit_length())
        slowest = self._numbers[self._core.ladder.log_tier]
        writer = ResidenceWriter(log2_entries, self._epoch, slowest)
        self.drop([domain])
        table = self._tables[domain] = _Table(domain, writer, self._blocks_of(domain))
        self._fill(table)
        return table

    def _blocks_of(self, domain: int) -> Iterator[tuple[NamespaceEntry, list[bytes]]]:
        for namespace in list(self._catalog.namespaces.values()):
            for part in range(NUM_PARTS) if namespace.domain == domain else ():
                present = self._catalog.prefix_hash
                names = [present[row] for row in namespace.rows.part(part)]  # later ones: see `_observe`
                for start in range(0, len(names), FILLED_AT_ONCE):
                    yield namespace, names[start : start + FILLED_AT_ONCE]

    def _fill(self, table: _Table) -> None:
        ends_at = perf_counter() + STRETCH_S
        while self._tables.get(table.domain) is table:
            piece = next(table.blocks, None)
            if piece is None:
                table.is_filled = True
                self._tell(table)
                return
            namespace, names = piece
            self._enter(table, namespace, namespace.rows.find(names), names)
            if perf_counter() > ends_at:
                asyncio.get_running_loop().call_soon(self._fill, table)
                return

    def _observe(self, *_: object) -> None:
        """Enter what a step changed."""
        for namespace_id, rows, names in self._core.transitions.take_changed():
            namespace = self._catalog.namespaces.get(namespace_id)
            if namespace is None:  # forgotten since, as those are that have no blocks
                for one in self._tables.values():
                    one.writer.set(b"".join(names), namespace_id, NOT_HERE)
            elif table := self._tables.get(namespace.domain):
                present = self._catalog.prefix_hash
                if any(present[row] is not name for row, name in zip(rows, names, strict=True)):
                    rows = namespace.rows.find(names)
                self._enter(table, namespace, rows, names)
        for table in list(self._tables.values()):
            if table.writer.is_half_full:
                self._replace(table.domain)
            else:
                self._tell(table)

    def _replace(self, domain: int) -> None:
        try:
            self._make(domain)
        except SharedMemoryError as problem:
            log.warning("lookups of a domain need calls from now on: %s", problem)
            self.drop([domain])

    def _enter(
        self, table: _Table, namespace: NamespaceEntry, rows: Sequence[int], names: Sequence[bytes]
    ) -> None:
        """Enter where blocks are now. A row of NO_ROW: they are nowhere."""
        codes = [self._code(namespace, row) for row in rows]
        first = codes[0]
        if codes.count(first) == len(codes):  # as of a put
            table.writer.set(b"".join(names), namespace.id, first)
            return
        for code, name in zip(codes, names, strict=True):
            table.writer.set(name, namespace.id, code)

    def _code(self, namespace: NamespaceEntry, row: int) -> int:
        """Return the number of a block's tier as a lookup tells it (requests/lookups.py), or NOT_HERE."""
        if row == NO_ROW:
            return NOT_HERE
        num_groups = namespace.num_groups
        for number, num_resident in self._in_memory:
            if num_resident[row] == num_groups:
                return number
        tier = self._catalog.tier_of(row)
        return NOT_HERE if tier is None else self._numbers[tier]

    def _tell(self, table: _Table) -> None:
        """Write what a missing block means, and the prices, if they changed."""
        planner, core, writer = self._planner, self._core, table.writer
        is_all = table.is_filled and not (core.offline or planner.fetches.is_open or writer.num_dropped)
        state = NOWHERE if is_all and planner.found_memory.is_settled else ASK
        edge, num_changes = core.costs.edge(), core.costs.num_changes
        told = state, edge, num_changes
        if told == table.told:
            return
        if not table.told or num_changes != table.told[2]:
            entries = [one for one in self._catalog.namespaces.values() if one.domain == table.domain]
            speeds = [(one.id, core.costs.speed(one.id)) for one in entries]
            writer.set_speeds(
                [(n, SOURCES.index(s.source), s.tokens_per_s, s.doubling_tokens) for n, s in speeds]
            )
        writer.set_edge(edge.bandwidth_bytes_per_s, edge.start_s)
        writer.set_state(state)
        table.told = told
