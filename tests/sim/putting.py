"""One put, in one step or in two, repeated, given up, and with staging memory that changes under it."""

from typing import TYPE_CHECKING, Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.appliance.core.results import PutOutcome, Refusal

from .requests import Chain, Client, Request
from .world import Violation

if TYPE_CHECKING:
    from .clients import Crowd


class Put(Request):
    """One put from its first request to its last answer."""

    def __init__(self, crowd: "Crowd", client: Client, chain: Chain, parent_hash: bytes) -> None:
        super().__init__(crowd, client, chain)
        self.parent_hash = parent_hash
        self.session_id = crowd.session_id()
        self.deadline_at = crowd.deadline()
        self.retention = crowd.retention(chain.namespace_id, chain.hashes)
        self.prefill_s = self.world.spread(0.01) if self.world.chance(crowd.config.hint_rate) else 0.0
        self.commit_id = crowd.request_id()
        self.reservation_id = 0
        self.tokens: dict[int, int] = {}  # by offset in the staging extent
        self.is_over = False
        self.was_refused = False
        self.due = 0.0

    def start(self, one_step: bool) -> None:
        """Send the first request."""
        wait_s = self.crowd.config.options.put_wait_s
        self.due = min(self.deadline_at, self.world.now + wait_s)
        if one_step:
            spans = [self._fill(prefix_hash) for prefix_hash in self.hashes]
            self._send(self._commit_whole, spans)
            self._change_staging()
        else:
            self._send(self._reserve_event)

    def _send(self, send: Any, *arguments: Any) -> None:
        """Send a request, and again with the same id now or later, as a client does that lost the answer."""
        send(*arguments)
        rates, world = self.crowd.config.rates, self.world
        if world.chance(rates["retry"]):
            world.after(world.spread(0.005), self._again, False, send, *arguments)
        if world.chance(rates["late_retry"]) and self.crowd.config.options.max_remembered_requests > 100:
            world.after(world.spread(2.0), self._again, True, send, *arguments)

    def _again(self, is_late: bool, send: Any, *arguments: Any) -> None:
        if self.crowd.expect(self.client) and not self.was_refused and (is_late or not self.is_over):
            self.world.counts["retry"] += 1
            send(*arguments)

    def _fill(self, prefix_hash: bytes) -> tuple[int, int]:
        """Write a block into the staging extent; return its span."""
        client, geometry = self.client, self.identity.geometry
        offset = start = client.next_offset
        for group in range(geometry.num_groups):
            token = self.crowd.contents.new((self.identity.digest, prefix_hash, group))
            self.crowd.contents.commit(token)
            client.staging.tokens[offset] = self.tokens[offset] = token
            offset += geometry.fragment_bytes[group]
        client.next_offset = offset
        self.crowd.accepted.add((self.identity.digest, prefix_hash))
        return start, geometry.block_bytes

    def _change_staging(self) -> None:
        """A faulty client writes other content for the same keys while the daemon copies."""
        if self.world.chance(self.crowd.config.rates["staging_changed"]):
            self.world.counts["staging_changed"] += 1
            self.world.after(self.world.spread(0.001), self._rewrite)

    def _rewrite(self) -> None:
        if self.is_over:
            return
        contents = self.crowd.contents
        for offset, token in self.tokens.items():
            changed = contents.new(contents.key_of(token))
            contents.commit(changed)
            self.client.staging.tokens[offset] = changed

    def _reserve_event(self, call: int = 0) -> ev.ReserveRequested:
        make = not call
        call = call or self.daemon.call(self.client.number, self._reserved, max(self.due, self.world.now))
        request = ev.ReserveRequested(
            call,
            self.client.number,
            self.request_id,
            self.namespace_id,
            self.parent_hash,
            self.hashes,
            self.session_id,
            self.deadline_at,
            self.prefill_s,
            self.retention,
        )
        if make:
            self.daemon.step(request)
        return request

    def _reserved(self, result: Any) -> None:
        if isinstance(result, Refusal) or self.reservation_id or self.is_over:
            return
        outcomes = result.outcomes
        if result.reservation_id == 0:
            return self._finish(outcomes)
        self.reservation_id = result.reservation_id
        fate = self.world.random()
        if fate < 0.7:
            self.world.after(self.world.spread(0.01), self._commit_rest, outcomes)
        elif fate < 0.85:
            self.world.after(self.world.spread(0.01), self._abort)
        return None

    def _commit_rest(self, outcomes: bytes) -> None:
        if not self.crowd.expect(self.client) or self.is_over:
            return
        needed = [h for h, o in zip(self.hashes, outcomes, strict=True) if o == PutOutcome.NEEDED]
        self._send(self._commit_event, [self._fill(prefix_hash) for prefix_hash in needed])
        self._change_staging()

    def _commit_event(self, spans: list[tuple[int, int]]) -> None:
        call = self.daemon.call(self.client.number, self._stored, self.world.now)
        self.daemon.step(
            ev.CommitRequested(call, self.client.number, self.commit_id, self.reservation_id, spans)
        )

    def _commit_whole(self, spans: list[tuple[int, int]]) -> None:
        call = self.daemon.call(self.client.number, self._stored, max(self.due, self.world.now))
        request = self._reserve_event(call)
        self.daemon.step(ev.CommitRequested(call, self.client.number, self.request_id, 0, spans, request))

    def _abort(self) -> None:
        if self.crowd.expect(self.client):
            self.is_over = True
            self.daemon.step(ev.AbortRequested(self.client.number, self.reservation_id))

    def _stored(self, result: Any) -> None:
        if isinstance(result, Refusal):
            self.was_refused = True  # a refusal is not remembered: the same id would begin anew
            if not self.is_over:
                self._reuse_staging()
        elif not self.is_over:
            self._finish(result.outcomes)

    def _finish(self, outcomes: bytes) -> None:
        """The answer is there: what it says must be true now, and the staging extent is free again."""
        if len(outcomes) != len(self.hashes):
            raise Violation("put outcomes", f"{len(outcomes)} outcomes for {len(self.hashes)} blocks")
        catalog = self.daemon.planner.catalog
        for prefix_hash, outcome in zip(self.hashes, outcomes, strict=True):
            if outcome not in (PutOutcome.STORED, PutOutcome.DEDUPLICATED):
                if outcome == 0:
                    raise Violation("put outcomes", "a block has no outcome")
                continue
            row = catalog.find(self.namespace_id, prefix_hash)
            is_there = row != NO_ROW and catalog.tier_of(row) is not None
            is_excused = (self.namespace_id, prefix_hash) in self.daemon.removed_now
            is_excused |= self.daemon.oracle.is_lossy
            if not is_there and outcome == PutOutcome.STORED and not is_excused:
                raise Violation("put outcomes", f"{prefix_hash.hex()[:8]} is STORED and not readable")
            if is_there and self.session_id and self.daemon.knows(self.client.number):
                model = self.daemon.oracle.session(self.session_id, self.client.number)
                model.blocks[self.namespace_id, prefix_hash] = None
        self.world.counts["put_answered"] += 1
        self._reuse_staging()

    def _reuse_staging(self) -> None:
        """Something else stands there from now on: a copy that is still to come reads that."""
        self.is_over = True
        for offset in self.tokens:
            self.client.staging.tokens[offset] = self.crowd.contents.garbage()
