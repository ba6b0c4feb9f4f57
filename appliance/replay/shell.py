"""What both shells share: a planner on virtual tiers, with one client and the trace's namespaces.

A subclass says how long things take. Replies, copies and segments are what a planner can be waiting for;
the rest of its instructions are about bytes, of which there are none.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ..core import events as ev
from ..core.instructions import Reply
from ..core.planner import Planner
from ..core.results import NamespaceResult, PutOutcome, PutResult, Result
from .future import TraceFuture
from .outcomes import Outcome, hits_by_tier
from .setups import Setup, identities_of
from .traces import I32, Trace
from .virtual import rooms_for

CLIENT = 1
Progress = Callable[[int], None]  # requests done so far
PROGRESS_STEP = 64
#: Bytes of what was stored, as a put's result has them.
STORED, DEDUPLICATED = bytes([PutOutcome.STORED]), bytes([PutOutcome.DEDUPLICATED])


#: Gets what failed and what took its place, in words.
PolicyFailedListener: TypeAlias = Callable[[str, str], None]


class PolicyFailed(ValueError):
    """An administrator's own policy raised, or answered nonsense; a daemon would go on without it."""


class Shell:
    """Drives one planner through one trace.

    Raises PolicyFailed, and ValueError for policies that cannot be built.
    """

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        progress: Progress | None = None,
        on_policy_failed: PolicyFailedListener | None = None,
        future: TraceFuture | None = None,
    ) -> None:
        """`on_policy_failed`: told instead of raising PolicyFailed; `future`: of this trace, if it exists."""
        self.trace = trace
        self.setup = setup
        self.progress = progress or (lambda _: None)
        identities = identities_of(trace, setup.shape)
        future = future or TraceFuture(trace)
        self.names = future.names
        geometries = [identity.geometry for identity in identities]
        rooms = rooms_for(setup.capacity_bytes, geometries, setup.ladder)
        # Clients send what is longer than a request may be in several; here that is one.
        longest = max(setup.options.max_blocks_per_request, int(np.diff(trace.first).max(initial=1)))
        options = replace(setup.options, max_blocks_per_request=longest)
        self.planner = Planner(
            options,
            rooms,
            policies=setup.choice,
            ladder=setup.ladder,
            future=future,
            on_policy_failed=on_policy_failed or _give_up,
        )
        self.results: dict[int, Result] = {}  # last answer per call, until it is taken
        self.num_refused_blocks = 0
        self.execute: dict[type, Callable[[Any], None]] = {Reply: self._reply}
        self._next_call = 0
        self.step(ev.ClientOpened(CLIENT, "replay", True, ""), 0.0)
        self.namespace_ids: list[int] = []
        self.block_bytes: list[int] = []
        for identity in identities:
            call = self.call()
            self.step(ev.NamespaceRegistered(call, identity, setup.shape.prefill), 0.0)
            answer = self.results.pop(call)
            if not isinstance(answer, NamespaceResult):
                raise ValueError(f"{setup.label}: {answer}")
            self.namespace_ids.append(answer.namespace_id)
            self.block_bytes.append(identity.geometry.block_bytes)

    def call(self) -> int:
        """Return a number for a call."""
        self._next_call += 1
        return self._next_call

    def step(self, event: ev.Event, now: float) -> None:
        """Give an event to the planner and execute what it answers."""
        execute = self.execute
        for instruction in self.planner.handle(event, now):
            act = execute.get(type(instruction))
            if act is not None:
                act(instruction)

    def chain_of(self, request: int) -> list[bytes]:
        """Return the prefix hashes that a request names."""
        names, first = self.names, self.trace.first
        return [names[block] for block in self.trace.blocks[first[request] : first[request + 1]].tolist()]

    def put_event(
        self, request: int, parent: bytes, chain: list[bytes], deadline_at: float
    ) -> ev.CommitRequested:
        """Return the put of `chain` under `parent`: reserve and commit in one, as clients do."""
        call = self.call()
        namespace = int(self.trace.namespace[request])
        session = self.trace.sessions[request]
        reserve = ev.ReserveRequested(
            call, CLIENT, "", self.namespace_ids[namespace], parent, chain, session, deadline_at
        )
        spans = [(0, self.block_bytes[namespace])] * len(chain)
        return ev.CommitRequested(call, CLIENT, "", 0, spans, reserve)

    def session_over(self, request: int, now: float) -> ev.Event | None:
        """Return what the session of a request says when it is over; None: nothing."""
        hint = self.trace.hints.get(request)
        session = self.trace.sessions[request]
        if hint is None or not session:
            return None
        if hint.is_end:
            num_decoded = hint.num_decoded_tokens
            return ev.SessionEnded(0, CLIENT, session, False, num_decoded)  # its answer is not awaited
        return ev.SessionUpdated(
            CLIENT,
            session,
            hint.urgency,
            back_at=now + hint.back_in_s,
            num_decoded_tokens=hint.num_decoded_tokens,
        )

    def count_refused(self, result: Result) -> None:
        """Count the blocks of a put that were refused."""
        if isinstance(result, PutResult):
            count = result.outcomes.count
            self.num_refused_blocks += len(result.outcomes) - count(STORED) - count(DEDUPLICATED)

    def capacities(self) -> dict[str, int]:
        """Return the size of every tier by name."""
        rooms = self.planner.rooms
        return {tier.label: rooms[tier].statistics().capacity_bytes for tier in sorted(rooms)}

    def outcome(self, num_hits: I32, tiers: Mapping[int, bytes], **figures: Any) -> Outcome:
        """Return what was done, audited; `num_hits` and `tiers` as for `hits_by_tier`, `figures` by field."""
        trace, setup, planner = self.trace, self.setup, self.planner
        block_hits, token_hits = hits_by_tier(trace, num_hits, tiers, setup.ladder)
        return Outcome(
            label=setup.label,
            policy=setup.policy,
            capacity=setup.capacity,
            capacity_bytes=self.capacities(),
            num_requests=trace.num_requests,
            num_blocks=int(trace.num_asked.sum()),
            num_tokens=int(trace.num_tokens.sum()),
            block_hits=block_hits,
            token_hits=token_hits,
            duration_s=trace.duration_s,
            counters=dict(planner.story.counters),
            num_refused_blocks=self.num_refused_blocks,
            problems=planner.check_integrity(),
            **figures,
        )

    def _reply(self, reply: Reply) -> None:
        self.results[reply.call] = reply.result


def cpu_seconds(run: Callable[[], None]) -> float:
    """Return processor seconds of `run`, without the garbage collector's.

    The catalog has no cycles, and walking it would be half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    began_at = time.process_time()
    try:
        run()
    finally:
        if was_enabled:
            gc.enable()
    return time.process_time() - began_at


def _give_up(words: str, instead: str) -> None:
    raise PolicyFailed(words)
