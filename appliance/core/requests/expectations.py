"""Expectations: acquires that wait for blocks which another runtime computes now.

    acquire -> are expected -> in this daemon: taken up in the step in which they are stored
                               at another host: it tells as they come, and each part is fetched at once

Prefill here, decode there. An acquire is answered with the length it may come to, and gets layers as they
land. It waits as long as computing what is missing would take, SLACK longer once blocks come, for then most
of it has come before; within what the caller allows. Nothing is awaited that loading brings later than
computing, nor of a host that cannot be asked. A block that never comes ends the prefix, as one that was lost.
A tenant has a share of the acquires that may wait; beyond it one is answered with what there is. They are
looked at in steps after which more may be there, not in each.

Rejected: places reserved for blocks that are still to come. They would be held for seconds by what may never
come, and a fetch waits for no room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from ....tiers.block import tenant_of
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from ..events import AcquireRequested, BlocksTold
from ..instructions import AwaitBlocks, StopAwaiting
from ..shares import Shares
from .acquire_job import AcquireJob
from .fetches import STEP_FRAGMENTS, Fetches
from .leases import ClientEntry
from .waiting_acquires import UnbegunFetches

#: Of the time that computing takes, waited for the last blocks when others have come.
SLACK: Final = 0.25


@dataclass(eq=False, slots=True)
class Awaited:
    """Blocks of one chain that another host is asked about, for all acquires that expect them."""

    number: int
    key: tuple[int, str, bytes]
    event: AcquireRequested  # the first one that expected them, and its client: fetches are its
    client: ClientEntry
    namespace: NamespaceEntry
    names: Sequence[bytes]  # the chain, from its start to the last expected block
    first: int  # of those asked about
    num_begun: int  # blocks from the start of the chain on that were here or are fetched
    num_told: int  # that are at the host
    is_over: bool = False  # nothing more is told
    jobs: dict[AcquireJob, None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Expectation:
    """What one acquire waits for."""

    job: AcquireJob
    namespace: NamespaceEntry
    begun_at: float
    compute_s: float  # what was missing at first
    until: float
    awaited: Awaited | None  # None: they are put into this daemon


class Expectations:
    """Acquires that wait for blocks which are not stored anywhere yet."""

    def __init__(self, core: CoreState, fetches: Fetches) -> None:
        self._core = core
        self._fetches = fetches
        self._waiting: dict[AcquireJob, Expectation] = {}
        self._awaited: dict[int, Awaited] = {}
        self._number_of: dict[tuple[int, str, bytes], int] = {}
        self._num_awaits = 0
        self._shares = Shares(core.options.max_expecting_acquires, core.options.num_tenants)
        self._looked_at = (0, 0)  # fetches begun and landings when acquires were looked at last
        self._is_look_due = False  # something else may have changed what they get
        #: Holds or brings up what an acquire was given.
        self.proceed: Callable[[AcquireJob], None] = lambda job: None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Return whether there is more to fetch than one step begins."""
        return bool(self._awaited) and any(one.num_begun < one.num_told for one in self._awaited.values())

    def wait_s(self, event: AcquireRequested, namespace: NamespaceEntry, num_here: int) -> float:
        """Return how long computing the expected blocks behind the first `num_here` takes, in s.

        0: nothing is expected, waiting for it does not pay, or as many acquires as may wait do."""
        expected = event.expected
        if expected is None or self._core.now >= min(expected.until, event.deadline_at):
            return 0.0
        first = max(num_here, event.first_block)
        num_blocks = min(expected.num_blocks, len(event.prefix_hashes)) - first
        if num_blocks <= 0 or (expected.source and not self._fetches.may_fetch(namespace)):
            return 0.0
        num_bytes = num_blocks * namespace.block_bytes if expected.source else 0
        wait_s = self._fetches.worth_waiting_s(
            namespace, first, num_blocks, num_bytes, self._fetches.host_speed, event.load_anyway
        )
        self._shares.resize(self._core.options.max_expecting_acquires, self._core.options.num_tenants)
        if wait_s and not self._shares.may_take(tenant_of(namespace.identity.domain), 1):
            self._core.story.count("expecting_beyond_share")
            return 0.0
        return wait_s

    def add(
        self,
        job: AcquireJob,
        client: ClientEntry,
        namespace: NamespaceEntry,
        names: Sequence[bytes],
        compute_s: float,
    ) -> None:
        """Let an acquire wait for what it has not got of `names`, its chain up to the last expected block."""
        event, now = job.request, self._core.now
        assert event.expected is not None
        until = min(now + compute_s, event.expected.until, event.deadline_at)
        awaited = None
        if event.expected.source:
            awaited = self._await(event, client, namespace, names, len(names) - job.num_awaited, compute_s)
            awaited.jobs[job] = None
        self._waiting[job] = Expectation(job, namespace, now, compute_s, until, awaited)
        self._shares.add(tenant_of(namespace.identity.domain), 1)
        self._is_look_due = True
        self._core.story.count("acquires_expecting")

    def _await(
        self,
        event: AcquireRequested,
        client: ClientEntry,
        namespace: NamespaceEntry,
        names: Sequence[bytes],
        num_here: int,
        compute_s: float,
    ) -> Awaited:
        assert event.expected is not None
        key = (namespace.id, event.expected.source, names[-1])
        number = self._number_of.get(key)
        if number is not None and not self._awaited[number].is_over:
            return self._awaited[number]
        self._num_awaits += 1
        number = self._number_of[key] = self._num_awaits
        awaited = Awaited(number, key, event, client, namespace, names, num_here, num_here, num_here)
        self._awaited[number] = awaited
        until = min(self._core.now + (1 + SLACK) * compute_s, event.expected.until, event.deadline_at)
        source, missing = event.expected.source, names[num_here:]
        self._core.outbox.emit(AwaitBlocks(number, namespace.identity, missing, source, until))
        return awaited

    def told(self, event: BlocksTold) -> None:
        """Fetch what a host has got meanwhile."""
        awaited = self._awaited.get(event.await_number)
        if awaited is None:
            return
        told = min(awaited.first + event.num_blocks, len(awaited.names))
        awaited.num_told = max(awaited.num_told, told)
        awaited.is_over = awaited.is_over or event.is_over
        self._is_look_due = True
        self._begin_some(awaited)

    def run(self) -> None:
        """Begin more fetches, and give acquires what is stored or on its way by now."""
        if not self._waiting:
            return
        for awaited in list(self._awaited.values()):
            if awaited.num_begun < awaited.num_told:
                self._begin_some(awaited)
                self._is_look_due = True
                break
        changes = (self._fetches.num_begun, self._core.transitions.num_landings)
        if changes == self._looked_at and not self._is_look_due:
            return
        self._looked_at, self._is_look_due = changes, False
        for expectation in list(self._waiting.values()):
            self._take_up(expectation)

    def _begin_some(self, awaited: Awaited) -> None:
        """Begin fetches of STEP_FRAGMENTS fragments of what is told and not begun."""
        fetches, namespace, names = self._fetches, awaited.namespace, awaited.names
        stored = len(fetches.prefix(namespace, names[awaited.num_begun : awaited.num_told]))
        awaited.num_begun += stored  # put into this daemon meanwhile, or fetched for others
        size = fetches.bundle_blocks(namespace)
        left = STEP_FRAGMENTS
        if not fetches.may_fetch(namespace):
            awaited.num_told, awaited.is_over = awaited.num_begun, True
        while left > 0 and awaited.num_begun < awaited.num_told:
            start = awaited.num_begun // size * size
            end = min(start + size, awaited.num_told)
            until = max(self._waiting[job].until for job in awaited.jobs)
            unbegun = UnbegunFetches(
                awaited.event, awaited.client, start, end, size, awaited.num_begun, until, fetches.host_speed
            )
            left -= (end - awaited.num_begun) * namespace.num_groups
            if not fetches.begin_bundle(unbegun, namespace, start, end):  # no room
                awaited.num_told, awaited.is_over = awaited.num_begun, True
                return
            awaited.num_begun = end

    def _take_up(self, expectation: Expectation) -> None:
        """Give an acquire the blocks that are stored, or fetched, by now; end it where no more can come."""
        job, namespace, awaited = expectation.job, expectation.namespace, expectation.awaited
        names = job.awaited_names()
        rows = self._fetches.prefix(namespace, names if job.is_level else islice(names, 1))
        if rows and not job.is_level:  # as soon as it is
            self._is_look_due = True
        elif rows:
            job.extend(rows)
            self.proceed(job)
            limit = expectation.begun_at + (1 + SLACK) * expectation.compute_s
            expected, deadline_at = job.request.expected, job.request.deadline_at
            assert expected is not None
            expectation.until = min(limit, expected.until, deadline_at)
        elif awaited is not None and awaited.is_over and awaited.num_begun >= awaited.num_told and not rows:
            job.expect_no_more()
        if not job.num_awaited:
            self.ended(job)

    def expire(self, now: float) -> None:
        """Let acquires that waited long enough settle for what has come, or is on its way."""
        for expectation in [one for one in self._waiting.values() if one.until <= now]:
            self._core.story.count("expected_too_late")
            expectation.job.expect_no_more()
            self.ended(expectation.job)

    def ended(self, job: AcquireJob) -> None:
        """An acquire waits for nothing more."""
        expectation = self._waiting.pop(job, None)
        if expectation is None:
            return
        self._shares.give(tenant_of(expectation.namespace.identity.domain), 1)
        awaited = expectation.awaited
        if awaited is None:
            return
        del awaited.jobs[job]
        if not awaited.jobs:
            del self._awaited[awaited.number]
            if self._number_of.get(awaited.key) == awaited.number:
                del self._number_of[awaited.key]
            if not awaited.is_over:
                self._core.outbox.emit(StopAwaiting(awaited.number))

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((one.until for one in self._waiting.values()), default=None)
