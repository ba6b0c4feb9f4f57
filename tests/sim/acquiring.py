"""One acquire, repeated or given up, the reads under its lease, and its release."""

from typing import TYPE_CHECKING, Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import Refusal
from kvtier.tiers.block import Urgency

from .ladder import HBM
from .readers import read_under_lease
from .requests import URGENCIES, Chain, Client, Request
from .world import Violation

if TYPE_CHECKING:
    from .clients import Crowd


class Acquire(Request):
    """One acquire, the reads under its lease, and its release."""

    def __init__(self, crowd: "Crowd", client: Client, chain: Chain) -> None:
        super().__init__(crowd, client, chain)
        self.session_id = crowd.session_id()
        self.urgency = self.world.rng.choice(URGENCIES)
        self.deadline_at = crowd.deadline()
        self.ttl_s = self.world.rng.choice((0.0, 0.0, 0.01, 1.0))
        self.first_block = self.world.rng.randrange(len(chain.hashes)) if self.world.random() < 0.2 else 0
        self.load_anyway = self.world.random() < 0.5
        self.on_device = self.world.random() < 0.5
        self.retention = crowd.retention(chain.namespace_id, chain.hashes)
        self.expected = crowd.expected.draw(chain)
        if self.expected is not None and self.expected.until == float("inf"):
            self.deadline_at = float("inf")  # only what the host tells ends the wait
        self.calls: list[int] = []
        self.lease_id = 0
        self.is_released = False
        self.num_reads = 0  # under way
        self.seen: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Send it, perhaps several times; perhaps stop listening."""
        world, rates = self.world, self.crowd.config.rates
        self.send()
        if world.chance(rates["retry"]):
            world.after(world.spread(0.005), self._again, False)
        if world.chance(rates["late_retry"]):
            world.after(world.spread(2.0), self._again, True)
        if world.random() < 0.05:
            world.after(world.spread(0.01), self._abandon)

    def send(self) -> None:
        """Send the request once."""
        due = max(self.deadline_at, self.world.now)
        call = self.daemon.call(self.client.number, self._answered, due)
        self.calls.append(call)
        if self.session_id and not self.lease_id:
            self._open_session()
        self.daemon.step(
            ev.AcquireRequested(
                call,
                self.client.number,
                self.request_id,
                self.namespace_id,
                self.hashes,
                self.session_id,
                self.urgency,
                self.ttl_s,
                self.deadline_at,
                self.first_block,
                self.load_anyway,
                self.retention,
                self.on_device,
                expected=self.expected,
            )
        )

    def _open_session(self) -> None:
        # A retry that finds its first try (it was no miss) does not touch the session, nor comes here.
        if len(self.hashes) <= self.crowd.config.options.max_blocks_per_request:
            model = self.daemon.oracle.session(self.session_id, self.client.number)
            # Decoding is promised only once an answer says so; anything else counts at once.
            model.urgency = Urgency.IDLE if self.urgency is Urgency.DECODING else self.urgency

    def _again(self, is_late: bool) -> None:
        if not self.crowd.expect(self.client) or not (is_late or not self.is_released):
            return
        if is_late and self.crowd.config.options.max_remembered_requests < 100:
            return  # forgotten: it would be another request
        self.world.counts["retry"] += 1
        self.send()

    def _abandon(self) -> None:
        """The caller gives up; nobody reads what was reported."""
        if not self.crowd.expect(self.client) or self.is_released or self.num_reads:
            return
        self.is_released = True
        for call in self.calls:
            self.daemon.forget_call(call)
        if self.lease_id:
            self.daemon.end_lease(self.lease_id)
        for call in self.calls:
            self.daemon.step(ev.AcquireAbandoned(call))
        if self.lease_id:
            self.daemon.step(ev.ReleaseRequested(None, self.client.number, [self.lease_id]))

    def _answered(self, result: Any) -> None:
        if isinstance(result, Refusal) or self.is_released:
            return
        if result.lease_id and not self.lease_id:
            self.lease_id = result.lease_id
            self.client.leases.append(result.lease_id)
        for ready in result.ready:
            if (ready.block, ready.group) in self.seen:
                continue
            self.seen.add((ready.block, ready.group))
            if ready.block >= len(self.hashes) or ready.block < self.first_block:
                raise Violation("replies", f"block {ready.block} was not asked for")
            key = (self.identity.digest, self.hashes[ready.block], ready.group)
            self.daemon.memories[ready.tier]  # a tier that has an address
            if ready.tier is HBM and not (self.on_device or self.crowd.config.hbm_is_shared):
                raise Violation("replies", f"block {ready.block} was offered in hbm, which is a GPU's")
            if self.world.random() < 0.7:
                read_under_lease(self, ready, key)
        if result.last:
            self._complete(result)
            if not self.world.chance(self.crowd.config.rates["never_released"]):
                self.world.after(self.world.spread(0.05), self.release)

    def _complete(self, result: Any) -> None:
        """The last answer promises: every group of every block from first_block to num_blocks is readable."""
        groups = self.identity.geometry.num_groups
        promised = {(b, g) for b in range(self.first_block, result.num_blocks) for g in range(groups)}
        missing = promised - self.seen
        if missing and result.lease_id:
            raise Violation("replies", f"promised {result.num_blocks} blocks, {sorted(missing)[:3]} missing")

    def release(self) -> None:
        """Let go of what the lease holds, once nothing is being read under it."""
        if not self.crowd.expect(self.client) or self.is_released:
            return
        if self.num_reads:
            self.world.after(0.01, self.release)
            return
        self.is_released = True
        self.daemon.end_lease(self.lease_id)
        self.daemon.step(ev.ReleaseRequested(None, self.client.number, [self.lease_id]))
        if self.world.chance(self.crowd.config.rates["released_twice"]):
            self.daemon.step(ev.ReleaseRequested(None, self.client.number, [self.lease_id, self.lease_id]))
