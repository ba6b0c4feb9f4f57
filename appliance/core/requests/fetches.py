"""Fetches: brings blocks from the source that an acquire asks for and no tier holds.

    acquire -> blocks are missing -> known to be there?  no: search, the acquire waits for its end
                                                          yes: fetch; the acquire gets its layers as they land

The source is where blocks are that this host does not own. What is known of it is a hint: what goes wrong is
a shorter prefix. Two acquires of one chain share search and fetch. What did not arrive rests: for a minute
what a store was to bring, for seconds what another host was, which itself is not asked for a moment then.

Nothing is fetched unless it arrives, beside all that is on its way already, by MARGIN sooner than computing
would: what is as slow as that saves nothing and takes room from what is here. Tenants take turns. No acquire
waits longer than computing takes, nor for a source of known speed much longer than that promises, or than
PATIENT_SHARE of computing: a source that is late for a moment would cost all of that. For the end of a search
it waits a tenth of its time at most, and not where searches seldom find, or its tenant has its share of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from ....tiers.block import tenant_of
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..copying.source_chain import SourceChain
from ..copying.source_index import SourceIndex
from ..copying.source_speed import HOST_LATENCY_S, MARGIN, STORE_LATENCY_S, BegunFetch, SourceSpeed
from ..events import AcquireRequested, LookedUp, ReserveRequested, SourceChanged, SourceSearched
from ..instructions import BundleBlocks
from ..turns import TenantTurns
from .fetch_job import FetchJob
from .leases import ClientEntry
from .put_job import PutJob
from .searches import Searches
from .waiting_acquires import ParkedAcquire, UnbegunFetches
from .write_requests import WriteRequests

PATIENCE_S: Final = 0.5  # later than expected it may always be, if computing takes longer
#: Of the time that computing takes, waited for what was expected sooner: by no more is a lost fetch dearer.
PATIENT_SHARE: Final = 0.25
#: Begun in one step, a bundle at least: 3 ms or so. An acquire waits until all of its fetches are begun.
STEP_FRAGMENTS: Final = 128
FETCH_BYTES: Final = 64 << 20  # in one fetch of several bundles: what a slot of NIXL's memory takes
#: Of the time that an acquire has: a store that hardly answers must not take what loading from here needs.
SEARCH_FRACTION: Final = 0.1
FETCH_FRACTION: Final = 0.8  # of it, for fetches: an answer at the last moment is late on a busy machine


class FetchPrice(NamedTuple):
    """What the source would bring of a chain beyond its stored blocks, as far as known."""

    num_blocks: int
    fetch_s: float


class Fetches:
    """Searches and fetches under way, and how fast the store and other hosts are."""

    def __init__(self, core: CoreState, index: SourceIndex, writes: WriteRequests) -> None:
        self._core = core
        self._index = index
        self._writes = writes
        self.is_open = False
        self._has_hosts = False  # what is searched for is not only bundles
        self._has_store = False
        #: Takes an acquire up again that waited for a search, with the time until which it may wait.
        self.resume: Callable[[AcquireRequested, float], None] = lambda event, until: None
        self._waiting: dict[int, ParkedAcquire] = {}  # by call
        self._unbegun: TenantTurns[UnbegunFetches] = TenantTurns()
        self.searches = Searches(core, index)
        self.num_begun = 0  # fetches, ever
        self._coming: dict[int, FetchJob] = {}  # by row: blocks on their way
        self._begun: dict[FetchJob, tuple[SourceSpeed, BegunFetch]] = {}
        self._store, self.host_speed = index.store_speed, SourceSpeed(HOST_LATENCY_S)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unbegun) + len(self._coming)

    @property
    def is_busy(self) -> bool:
        """Return whether there is more to begin than one step begins."""
        return len(self._unbegun) > 0

    # ------------------------------------------------------------------------------------ requests

    def begin(
        self,
        event: AcquireRequested,
        client: ClientEntry,
        namespace: NamespaceEntry,
        num_blocks: int,
        until: float | None = None,
    ) -> bool:
        """Start to fetch what the source holds of the first `num_blocks` blocks of an acquire.

        Returns True when a search comes first, or more steps: `resume` gets the event when they have ended.
        `until`: as long may one wait that waited for a search already.
        """
        if self._writes.is_closed or self._core.is_erased(namespace):
            return False
        chain = self._chain(namespace, event.prefix_hashes[:num_blocks])
        here = self.prefix(namespace, chain.names)
        num_here = len(here)
        if here and self._core.catalog.position[here[0]]:
            return False  # it does not begin where its chain does: its bundles cannot be named
        first = chain.bundle_start(num_here)
        bundles, end = chain.asked(first)
        is_searched = until is not None or chain.is_known(first)
        if is_searched:
            end = chain.present_end(first)
        speed = self._speed_of(chain, first) if is_searched else self._fastest()
        end, wait_s = self._worth_fetching(event, namespace, num_here, first, end, speed, is_searched)
        now = self._core.now
        latest_at = now + FETCH_FRACTION * (event.deadline_at - now)
        deadline_at = min(latest_at, now + wait_s if until is None else until)
        if not wait_s or deadline_at <= now:
            return False
        if not is_searched:
            number = self.searches.begin(namespace, chain.names[:end], bundles, num_here, first)
            if number is None:
                return False
            if not event.load_anyway and not self._is_search_worth(namespace, num_here, end, speed):
                self._core.story.count("searches_not_waited_for")
                return False
            search_until = min(deadline_at, now + SEARCH_FRACTION * (event.deadline_at - now))
            self._waiting[event.call] = ParkedAcquire(event, search_until, deadline_at, number)
            return True
        if speed.is_known(now) and not event.load_anyway:
            expected_s = self._fetch_s(speed, namespace, (end - num_here) * namespace.block_bytes)
            patience_s = max(PATIENCE_S, MARGIN * expected_s, PATIENT_SHARE * wait_s)
            deadline_at = min(deadline_at, now + patience_s)
        size = chain.size * self._bundles_a_fetch(namespace, -(-(end - first) // chain.size))
        unbegun = UnbegunFetches(event, client, first, end, size, num_here, deadline_at, speed)
        if self._begin_some(unbegun):
            return False
        self._unbegun.add(tenant_of(namespace.identity.domain), unbegun)
        return True

    def run(self) -> None:
        """Begin more of what an acquire of the next tenant fetches, and take it up when that was all."""
        if self._unbegun:
            unbegun = self._unbegun.first()
            if self._begin_some(unbegun):
                self._unbegun.pop()
                self.resume(unbegun.event, unbegun.until)
            else:
                self._unbegun.pass_on()

    def _begin_some(self, unbegun: UnbegunFetches) -> bool:
        """Begin fetches of STEP_FRAGMENTS fragments. Whether they were the last, or none can begin."""
        namespace = self._core.catalog.namespaces[unbegun.event.namespace_id]
        if not self.may_fetch(namespace):
            return True
        num_bundles = max(1, STEP_FRAGMENTS // (unbegun.size * namespace.num_groups))
        step_end = min(unbegun.end, unbegun.start + num_bundles * unbegun.size)
        for start in range(unbegun.start, step_end, unbegun.size):
            if not self.begin_bundle(unbegun, namespace, start, min(start + unbegun.size, unbegun.end)):
                return True
        unbegun.start = step_end
        return step_end == unbegun.end

    def _bundles_a_fetch(self, namespace: NamespaceEntry, num_bundles: int) -> int:
        """Return how many bundles of so many to fetch at once: a store has them one by one; of a host as many
        as one step begins, but half of them at most, because two connections are faster than one."""
        if self._has_store or not self._has_hosts:
            return 1
        most = min(STEP_FRAGMENTS // namespace.num_groups, FETCH_BYTES // namespace.block_bytes)
        return max(1, min(most // self._index.num_blocks(namespace), -(-num_bundles // 2)))

    def _worth_fetching(
        self,
        event: AcquireRequested,
        namespace: NamespaceEntry,
        num_here: int,
        first: int,
        end: int,
        speed: SourceSpeed,
        is_searched: bool,
    ) -> tuple[int, float]:
        """Return the end of the blocks behind the first `num_here` that are worth fetching, in bundles from
        block `first` on, and how long to wait for them; 0 s: none is."""
        if end <= num_here:
            return end, 0.0
        start = max(num_here, event.first_block)
        num_bytes = (end - num_here) * namespace.block_bytes
        wait_s = self.worth_waiting_s(namespace, start, end - start, num_bytes, speed, event.load_anyway)
        if not wait_s and not speed.is_known(self._core.now) and not self._coming:
            # One bundle tells how fast the source is, which may be faster than assumed.
            wait_s = self.worth_waiting_s(namespace, start, end - start, 0, speed)
            end = min(end, first + self._index.num_blocks(namespace)) if is_searched else end
        if not wait_s:
            self._core.story.count("fetches_not_worth_it")
        return end, wait_s

    def _chain(self, namespace: NamespaceEntry, names: Sequence[bytes]) -> SourceChain:
        return SourceChain(self._index, namespace, names, self._has_hosts)

    def looked_up(self, event: LookedUp) -> None:
        """Search for the rest of a chain that was looked up, for the next lookup or acquire of it."""
        namespace = self._core.catalog.namespaces.get(event.namespace_id)
        if namespace is None or not self.may_fetch(namespace):
            return
        chain = self._chain(namespace, event.prefix_hashes)
        num_here = len(self.prefix(namespace, chain.names))
        known = chain.bundles_end(chain.bundle_start(num_here))
        bundles, end = chain.asked(known)
        if (
            end > max(known, num_here)
            and not chain.is_known(known)
            and self.worth_waiting_s(
                namespace, num_here, end - num_here, (end - num_here) * namespace.block_bytes, self._fastest()
            )
        ):
            self.searches.begin(namespace, chain.names[:end], bundles, max(known, num_here), known)

    def begin_bundle(self, unbegun: UnbegunFetches, namespace: NamespaceEntry, start: int, end: int) -> bool:
        """Fetch the bundle of blocks `start` to `end`. Whether all of them are on their way."""
        event, speed, first = unbegun.event, unbegun.speed, max(start, unbegun.num_here)
        chain = event.prefix_hashes
        parent_hash = chain[start - 1] if start else b""
        urgency = self._writes.urgency_of(event)
        bundle = BundleBlocks(namespace.identity, parent_hash, start, chain[start:end], urgency)
        request = ReserveRequested(
            0,
            event.client,
            "",
            namespace.id,
            chain[first - 1] if first else b"",
            chain[first:end],
            event.session_id,
            retention=event.retention,
        )
        job = self._writes.fetch(request, unbegun.client, namespace, bundle, chain[first:], self._ended)
        job.begin(unbegun.until)
        if not job.is_done:
            self._coming.update(dict.fromkeys(job.coming, job))
            tenant = tenant_of(namespace.identity.domain)
            self.num_begun += 1
            self._begun[job] = speed, speed.began(job.num_bytes, self._core.now, unbegun.until, tenant)
        return len(self.prefix(namespace, chain[first:end])) == end - first

    def _ended(self, job: PutJob) -> None:
        """A fetch ended: learn how fast the source is, and not to ask for this bundle again at once."""
        assert isinstance(job, FetchJob)
        if job not in self._begun:
            return
        for row in job.coming:
            del self._coming[row]
        (speed, begun), story = self._begun.pop(job), self._core.story
        speed.ended(begun, job.num_bytes, job.landed_bytes, job.is_late, self._core.now)
        if job.num_failed:
            story.count("fetches_failed")
            size, names = self._index.num_blocks(job.namespace), job.bundle.names
            for name in dict.fromkeys([*names[size - 1 :: size], names[-1]]):
                is_stored = self._index.is_stored(job.namespace.id, name)
                self._index.note(job.namespace.id, name, False, is_stored=is_stored)
            return
        story.count("blocks_fetched", len(job.coming))
        story.count("bytes_fetched", job.num_bytes)

    def may_fetch(self, namespace: NamespaceEntry) -> bool:
        """Return whether anything may be fetched of a namespace now."""
        return self.is_open and not self._writes.is_closed and not self._core.is_erased(namespace)

    def bundle_blocks(self, namespace: NamespaceEntry) -> int:
        """Return how many blocks the source keeps together."""
        return self._index.num_blocks(namespace)

    def prefix(self, namespace: NamespaceEntry, names: Iterable[bytes]) -> list[int]:
        """Return the rows of the longest prefix of a chain that is stored or on its way from the source."""
        readable_from, rows = self._core.readable_from, []
        for name in names:
            row = namespace.rows.get(name, NO_ROW)
            if row == NO_ROW or (readable_from(row) is None and row not in self._coming):
                break
            rows.append(row)
        return rows

    # -------------------------------------------------------------------------------------- prices

    def worth_waiting_s(
        self,
        namespace: NamespaceEntry,
        position: int,
        num_blocks: int,
        num_bytes: int,
        speed: SourceSpeed,
        load_anyway: bool = False,
    ) -> float:
        """Return how long to wait for `num_blocks` blocks: as long as computing them takes.

        0 when that is sooner than the `num_bytes` of the source, if the caller does not insist."""
        if num_blocks <= 0:
            return 0.0
        costs = self._core.costs
        limit_s = self._core.options.fetch_wait_s
        if costs.prefill_speed(namespace.id)[1] != "geometry":
            limit_s = costs.recompute_s(namespace.id, position, num_blocks)
        fetch_s = self._fetch_s(speed, namespace, num_bytes)
        return limit_s if load_anyway or MARGIN * fetch_s < limit_s else 0.0

    def _fetch_s(self, speed: SourceSpeed, namespace: NamespaceEntry, num_bytes: int) -> float:
        """Return how long so many bytes of a namespace take beside all that is on its way."""
        return speed.fetch_s(num_bytes, self._core.now, tenant_of(namespace.identity.domain))

    def _is_search_worth(self, namespace: NamespaceEntry, first: int, end: int, speed: SourceSpeed) -> bool:
        """Return whether what a search for blocks `first` to `end` is likely to save repays its time."""
        costs = self._core.costs
        if costs.prefill_speed(namespace.id)[1] == "geometry":
            return True
        num_bytes = (end - first) * namespace.block_bytes if speed.is_known(self._core.now) else 0
        saved_s = costs.recompute_s(namespace.id, first, end - first)
        saved_s -= self._fetch_s(speed, namespace, num_bytes)
        search_s = STORE_LATENCY_S if self._has_store else 0.0  # what hosts have is known here
        return namespace.search_chance * saved_s > search_s

    def bundle_seconds(self, namespace: NamespaceEntry) -> tuple[float, float] | None:
        """Return (fetch_s, recompute_s) of the first bundle of a chain, None before prefill was measured."""
        costs, num_blocks = self._core.costs, self._index.num_blocks(namespace)
        if costs.prefill_speed(namespace.id)[1] == "geometry":
            return None
        fetch_s = self._store.alone_s(num_blocks * namespace.block_bytes, self._core.now)
        return fetch_s, costs.recompute_s(namespace.id, 0, num_blocks)

    def _speed_of(self, chain: SourceChain, first: int) -> SourceSpeed:
        """Return the speed of what has the bundle that begins with block `first`."""
        return self._store if not self._has_hosts or chain.is_stored(first) else self.host_speed

    def _fastest(self) -> SourceSpeed:
        """Return the speed of the faster one of what can be asked."""
        if not self._has_hosts:
            return self._store
        if not self._has_store:
            return self.host_speed
        return max(self._store, self.host_speed, key=lambda speed: speed.bytes_per_s(self._core.now))

    def price(self, namespace: NamespaceEntry, names: Sequence[bytes], num_stored: int) -> FetchPrice:
        """Return what an acquire would fetch of a chain beyond `num_stored` blocks, as far as is known.

        Nothing where computing is sooner. Asks nothing, changes nothing."""
        chain = self._chain(namespace, names)
        first = chain.bundle_start(num_stored)
        num_blocks = max(0, chain.present_end(first) - num_stored)
        num_bytes = num_blocks * namespace.block_bytes
        speed = self._speed_of(chain, first)
        if not self.worth_waiting_s(namespace, num_stored, num_blocks, num_bytes, speed):
            return FetchPrice(0, 0.0)
        return FetchPrice(num_blocks, self._fetch_s(speed, namespace, num_bytes))

    def host_fetch_s(self, num_bytes: int) -> float:
        """Return how long so many bytes of another host take on a link with nothing else on it."""
        return self.host_speed.alone_s(num_bytes, self._core.now)

    def search_s(self, namespace_id: int, names: Sequence[bytes], num_stored: int) -> float:
        """Return how long the search that is under way for a chain may be waited for; 0 when there is none.

        That is as long as computing what is beyond `num_stored` blocks takes."""
        namespace = self._core.catalog.namespaces[namespace_id]
        chain = self._chain(namespace, names)
        end = chain.bundles_end(chain.bundle_start(num_stored)) + chain.size  # of the first that is searched
        if end > len(names) or self.searches.find(namespace_id, names[end - 1]) is None:
            return 0.0
        num_blocks = chain.bundle_start(len(names)) - num_stored
        num_bytes = num_blocks * namespace.block_bytes
        return self.worth_waiting_s(namespace, num_stored, num_blocks, num_bytes, self._fastest())

    # -------------------------------------------------------------------------------------- events

    def changed(self, event: SourceChanged) -> None:
        """The source can be asked from now on, or cannot."""
        self.is_open, self._has_hosts, self._has_store = event.is_open, event.has_hosts, event.takes_exports
        if not event.is_open:
            self._resume(list(self._waiting))  # those with more to begin: by their next step

    def searched(self, event: SourceSearched) -> None:
        """Take up the acquires that waited for a search."""
        self.searches.ended(event)
        self._resume([call for call, one in self._waiting.items() if one.search == event.search])

    def expire(self, now: float) -> None:
        """Take up the acquires that waited long enough."""
        if self._waiting:
            self._resume([call for call, one in self._waiting.items() if one.search_until <= now])

    def _resume(self, calls: Sequence[int]) -> None:
        for waiting in [self._waiting.pop(call) for call in calls]:
            self.resume(waiting.event, waiting.until)

    def abandon(self, call: int) -> bool:
        """Forget an acquire that is held back; False when it is not."""
        is_parked = self._waiting.pop(call, None) is not None
        return is_parked or bool(self._unbegun.take(lambda one: one.event.call == call))

    def take_calls_of(self, client_id: int) -> list[int]:
        """Forget the acquires of a client that are held back; return their calls."""
        mine = [call for call, one in self._waiting.items() if one.event.client == client_id]
        for call in mine:
            del self._waiting[call]
        return mine + [
            one.event.call for one in self._unbegun.take(lambda one: one.event.client == client_id)
        ]

    def namespaces(self) -> set[int]:
        """Return the namespaces of the acquires that are held back."""
        waiting = [one.event.namespace_id for one in self._waiting.values()]
        return {*waiting, *(one.event.namespace_id for one in self._unbegun)}

    def check_integrity(self) -> list[str]:
        """Audit what each tenant has on its way."""
        problems = []
        for name, speed in (("store", self._store), ("hosts", self.host_speed)):
            num_bytes: Counter[str] = Counter()
            for job, (one, begun) in self._begun.items():
                if one is speed:
                    num_bytes[begun.tenant] += job.num_bytes
            if num_bytes != speed.on_their_way:
                problems.append(f"bytes on their way from {name}: {speed.on_their_way} != {num_bytes}")
        return problems

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((one.search_until for one in self._waiting.values()), default=None)
