"""ColdQuota: what a tenant may keep in the cold store, and which records are evicted beyond that.

Segments mix tenants and come back whole, so an evicted record leaves dead space until its segment is
reclaimed; what is counted is payload that can be read. Evicted is the end of one of the tenant's oldest
chains: of a chain the end is worth least, and the order in which its blocks became known is the one order
that costs nothing to keep.

Rejected: refusing to spill at the limit. The store would keep for ever what happened to come first.

A start finds every record in segments that are still there, also evicted ones: a log has no place to write
that down. So a tenant may have more than its quota again, and the excess is evicted at once."""

from collections import Counter, defaultdict

from ....tiers.block import tenant_of
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.table import NUM_PARTS

#: Blocks of a namespace that are looked at in one search for a chain to shorten.
MAX_CHAINS = 64
#: Of so many blocks those go first that were used longest ago: all of a part are 39,000 of ten million.
NUM_SORTED = 1024
#: Blocks that go for one newcomer; after a quota was lowered, the rest goes with the next ones.
MAX_STEPS = 64
#: Blocks and parts of tables looked at in a step: a fraction of a millisecond. The tenants with quotas
#: have equal shares, of MIN_VISITS at least.
MAX_VISITS = 4096
MIN_VISITS = 64


class ColdQuota:
    """Makes room within a tenant's quota. Costs nothing where there is none.

    A search that takes more than a tenant may look at in a step goes on in the next one; until then its
    blocks are not admitted."""

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency
        self._log_tier = core.ladder.log_tier
        #: Why a block was evicted because of a quota.
        self.reason = f"beyond its tenant's quota of {self._log_tier.label}"
        self._next_part: defaultdict[int, int] = defaultdict(int)  # of its table, by namespace
        #: By namespace: rows of the part before, which are taken from the end, sorted by NUM_SORTED.
        self._of_part: dict[int, list[int]] = {}
        #: By namespace: handle of the block from which the next search goes on towards the end of its chain.
        self._next_block: dict[int, int] = {}
        self._visits: Counter[str] = Counter()  # of this step, by tenant
        self._namespaces: defaultdict[str, list[NamespaceEntry]] = defaultdict(list)  # by tenant
        self._known_changes = -1  # of namespaces, which these are after

    def begin_step(self) -> None:
        """Let each tenant's searches look at as much as one step may again."""
        self._visits.clear()

    def admits(self, row: int) -> bool:
        """Whether a block may enter the cold store, once older ones of its tenant were evicted if need be."""
        for _ in range(MAX_STEPS):
            if self.has_room(row):
                return True
            namespace = self._core.catalog.namespace_of(row)
            if not self._visit(namespace):
                return False
            namespaces = self._largest_first(namespace)
            is_shorter = any(self._shorten(one, row) for one in namespaces)
            self._visit(namespace, len(namespaces))
            if not is_shorter:
                return False
        return False

    def has_room(self, row: int) -> bool:
        """Whether a block may enter the cold store, and no other of its tenant has to be evicted for it."""
        if not self._core.options.quotas:
            return True
        namespace = self._core.catalog.namespace_of(row)
        quota = self._core.options.quotas.get(tenant_of(namespace.identity.domain))
        if quota is None or quota.cold_bytes is None:
            return True
        return self._stored_bytes(namespace) + namespace.block_bytes <= quota.cold_bytes

    def enforce(self) -> None:
        """Give up what any tenant has beyond its quota, the ends of its longest chains first. At start."""
        core = self._core
        residency = self._residency
        for tenant, quota in self._core.options.quotas.items():
            if quota.cold_bytes is None:
                continue
            namespaces = self._namespaces_of(tenant)
            excess_bytes = sum(core.transitions.cold_bytes[one.id] for one in namespaces) - quota.cold_bytes
            if excess_bytes <= 0:
                continue
            rows = [row for one in namespaces for row in one.rows.values()]
            rows.sort(key=core.catalog.position.__getitem__, reverse=True)
            for row in rows:
                if excess_bytes > 0 and residency.may_leave(row, self._log_tier):
                    excess_bytes -= residency.evict(row, self._log_tier, self.reason)

    def _namespaces_of(self, tenant: str) -> list[NamespaceEntry]:
        catalog = self._core.catalog
        if self._known_changes != catalog.num_namespace_changes:
            self._known_changes = catalog.num_namespace_changes
            self._namespaces.clear()
            for one in catalog.namespaces.values():
                self._namespaces[tenant_of(one.identity.domain)].append(one)
            self._of_part.clear()
            self._next_block = {
                number: handle for number, handle in self._next_block.items() if number in catalog.namespaces
            }
        return self._namespaces[tenant]

    def _largest_first(self, namespace: NamespaceEntry) -> list[NamespaceEntry]:
        """Return the namespaces of a tenant that have records, the one with most first: what an old model
        left must not keep a new one out for ever."""
        cold_bytes = self._core.transitions.cold_bytes
        mine = self._namespaces_of(tenant_of(namespace.identity.domain))
        return sorted((one for one in mine if cold_bytes[one.id]), key=lambda one: -cold_bytes[one.id])

    def _stored_bytes(self, namespace: NamespaceEntry) -> int:
        """Return what the tenant of a namespace has in the cold store, all its namespaces together."""
        tenant = tenant_of(namespace.identity.domain)
        return sum(self._core.transitions.cold_bytes[one.id] for one in self._namespaces_of(tenant))

    def _visit(self, namespace: NamespaceEntry, number: int = 1) -> bool:
        """Count so much more that is looked at for a tenant. Returns whether it may be, in this step."""
        tenant = tenant_of(namespace.identity.domain)
        self._visits[tenant] += number
        return self._visits[tenant] <= max(MIN_VISITS, MAX_VISITS // len(self._core.options.quotas))

    def _shorten(self, namespace: NamespaceEntry, newcomer: int) -> bool:
        """Give up the last cold block of one of a namespace's oldest chains; False: none may go, or none was
        found in this step."""
        handle = self._next_block.pop(namespace.id, None)
        if handle is not None and self._evict_end(namespace, self._core.catalog.row_of(handle), newcomer):
            return True
        catalog, rows = self._core.catalog, self._of_part.pop(namespace.id, [])
        num_parts = num_rows = 0
        while num_rows < MAX_CHAINS and self._visit(namespace):
            if not rows:  # of a tenant with few blocks most parts are empty
                if num_parts == NUM_PARTS:
                    return False
                part = self._next_part[namespace.id]
                self._next_part[namespace.id] = (part + 1) % NUM_PARTS
                num_parts += 1
                rows = namespace.rows.part(part)
                self._sort_end(rows, len(rows) % NUM_SORTED)
                continue
            if len(rows) % NUM_SORTED == 0:
                self._sort_end(rows, NUM_SORTED)
            row = rows.pop()
            num_rows += 1
            if catalog.namespace_id[row] != namespace.id or not catalog.prefix_hash[row]:
                continue  # gone since
            if self._evict_end(namespace, row, newcomer):
                self._of_part[namespace.id] = rows
                return True
        self._of_part[namespace.id] = rows
        return False

    def _sort_end(self, rows: list[int], number: int) -> None:
        """Put those of the last `number` rows at the end that were used longest ago."""
        first = len(rows) - number
        rows[first:] = sorted(rows[first:], key=self._core.catalog.last_used.__getitem__, reverse=True)

    def _evict_end(self, namespace: NamespaceEntry, row: int, newcomer: int) -> bool:
        """Evict the deepest block below `row` (or itself) along first children that is in the cold store, if
        it may go. What is before it is looked at first the next time, and so is what this step did not
        reach."""
        catalog, residency = self._core.catalog, self._residency
        placed, last = catalog.num_placed[self._log_tier], NO_ROW
        while row != NO_ROW:
            if not self._visit(namespace):
                self._next_block.setdefault(namespace.id, catalog.handle(row))
                return False
            if placed[row]:
                last = row
            row = catalog.first_child[row]
        if last in (NO_ROW, newcomer) or not residency.may_leave(last, self._log_tier):
            return False
        if (parent := catalog.parent[last]) != NO_ROW:
            self._next_block[namespace.id] = catalog.handle(parent)
        residency.evict(last, self._log_tier, self.reason)
        return True
