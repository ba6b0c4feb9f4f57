"""A state machine over the planner against a dictionary.

Hypothesis chooses what happens next; the model knows only which blocks were ever committed, what each live
lease was told, and which blocks a decoding session was told it has. Everything else is invariants, and they
hold whoever says who leaves: every policy there is, and one of an administrator's own.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import BlockChange
from kvtier.appliance.core.results import AcquireResult, PutOutcome, PutResult, Refusal, ReserveResult
from kvtier.policies.registry import ADMISSION, EVICTION, PREFETCH, PolicyChoice
from kvtier.tiers.base import Cause
from kvtier.tiers.block import STANDARD_TIERS, Tier, Urgency
from tests.policies.own import LONGEST_FIRST

from ..rig import CLIENT, GEOMETRY, Rig, hashes

CHAINS = [hashes(name, 4) for name in "ab"]
NEXT = {name: follower for chain in CHAINS for name, follower in pairwise(chain)}
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 4)
picks = st.integers(0, 5)
REPLAY_ONLY = {"clairvoyant"}
EVICTIONS = [*sorted(EVICTION.keys() - REPLAY_ONLY), LONGEST_FIRST]
admissions = st.sampled_from(sorted(ADMISSION.keys() - REPLAY_ONLY))
prefetchers = st.sampled_from(["", *sorted(PREFETCH)])


class PlannerMachine(RuleBasedStateMachine):
    """Three blocks of dram, one of hbm, a cold store of four small segments or none."""

    rig: Rig

    @initialize(
        eviction=st.sampled_from(EVICTIONS),
        admission=admissions,
        prefetch=prefetchers,
        nvme_blocks=st.sampled_from([0, 2]),
        has_faults=st.booleans(),
    )
    def begin(self, eviction: str, admission: str, prefetch: str, nvme_blocks: int, has_faults: bool) -> None:
        choice = PolicyChoice(eviction, admission, prefetch, allowed_modules=("tests",))
        self.rig = Rig(
            policies=choice,
            dram_blocks=3,
            nvme_blocks=nvme_blocks,
            num_segments=4,
            hbm_blocks=1,
            lease_ttl_s=5.0,
            put_wait_s=1.0,
            reservation_ttl_s=2.0,
            max_waiting_puts=3,
            high_watermark=0.7,
            low_watermark=0.4,
        )
        self.has_faults = has_faults  # where nothing fails, nothing may get lost
        self.committed: set[bytes] = set()
        self.puts: dict[int, tuple[list[bytes], str]] = {}  # call -> chain and session, not answered
        self.acquires: dict[int, list[bytes]] = {}  # call -> chain, not released yet
        self.reservations: list[tuple[int, int]] = []
        self.decoding: set[bytes] = set()  # blocks that session "d" was told it has
        self.is_decoding = False
        self.is_lossy = False
        self.num_notices = 0  # looked at

    @rule(chain=chains, length=lengths, session=st.sampled_from(["", "d"]))
    def put(self, chain: list[bytes], length: int, session: str) -> None:
        call = self.rig.start_put(chain[:length], session_id=session)
        self.committed |= set(chain[:length])
        self.puts[call] = chain[:length], session
        self._look_at_puts()

    @rule(chain=chains, length=lengths)
    def reserve(self, chain: list[bytes], length: int) -> None:
        call = self.rig.reserve(chain[:length])
        result = self.rig.answers.get(call, [None])[0]
        if isinstance(result, ReserveResult) and result.reservation_id:
            needed = result.outcomes.count(PutOutcome.NEEDED)
            self.reservations.append((result.reservation_id, needed))
            self.committed |= set(chain[:length])

    @precondition(lambda self: self.reservations)
    @rule(abort=st.booleans())
    def commit_or_abort(self, abort: bool) -> None:
        reservation_id, needed = self.reservations.pop()
        if abort:
            self.rig.do(ev.AbortRequested(CLIENT, reservation_id))
        else:
            self.rig.commit(reservation_id, needed)

    @precondition(lambda self: self.rig.copies)
    @rule(pick=picks, cause=st.sampled_from([None, None, None, Cause.IO_ERROR, Cause.WRONG_CHECKSUM]))
    def end_copy(self, pick: int, cause: Cause | None) -> None:
        copy = self.rig.copies[pick % len(self.rig.copies)]
        cause = cause if self.has_faults else None
        self.is_lossy |= cause is not None
        self.rig.finish(copy, cause)
        self._look_at_puts()

    @rule()
    def end_all_copies(self) -> None:
        self.rig.settle()
        self._look_at_puts()

    @rule(chain=chains, length=lengths, deadline_s=st.sampled_from([0.5, float("inf")]))
    def acquire(self, chain: list[bytes], length: int, deadline_s: float) -> None:
        deadline_at = self.rig.now + deadline_s
        call = self.rig.acquire(chain[:length], deadline_at=deadline_at)
        if not isinstance(self.rig.answer(call), Refusal):
            self.acquires[call] = chain[:length]

    @precondition(lambda self: self.acquires)
    @rule(pick=picks, twice=st.booleans())
    def release(self, pick: int, twice: bool) -> None:
        call = list(self.acquires)[pick % len(self.acquires)]
        self.rig.release(call)
        if twice:
            self.rig.release(call)
        del self.acquires[call]

    @rule(urgency=st.sampled_from([Urgency.DECODING, Urgency.IDLE]))
    def update_session(self, urgency: Urgency) -> None:
        self.is_decoding = urgency is Urgency.DECODING
        self.rig.do(ev.SessionUpdated(CLIENT, "d", urgency))

    @rule(archive=st.booleans())
    def end_session(self, archive: bool) -> None:
        self.is_decoding, self.decoding = False, set()
        self.rig.do(ev.SessionEnded(self.rig.call(), CLIENT, "d", archive))

    @rule(chain=chains, floor=st.sampled_from(STANDARD_TIERS))
    def pin(self, chain: list[bytes], floor: Tier) -> None:
        call = self.rig.call()
        self.rig.do(ev.PinRequested(call, CLIENT, "", self.rig.namespace_id, chain, floor, 3.0))

    @rule(chain=chains, tier=st.sampled_from([Tier.HBM, Tier.DRAM]))
    def prefetch(self, chain: list[bytes], tier: Tier) -> None:
        call = self.rig.call()
        self.rig.do(ev.PrefetchRequested(call, CLIENT, self.rig.namespace_id, chain, tier))

    @rule(tier=st.sampled_from([Tier.HBM, Tier.DRAM]))
    def evict(self, tier: Tier) -> None:
        self.rig.do(ev.EvictRequested(self.rig.call(), tier, 0))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.rig.tick(seconds)
        self._look_at_puts()

    @precondition(lambda self: self.has_faults)
    @rule(offline=st.booleans())
    def lose_nvme(self, offline: bool) -> None:
        self.rig.do(ev.TierLost(Tier.NVME, offline, "test"))

    @precondition(lambda self: self.has_faults)
    @rule()
    def lose_hbm(self) -> None:
        self.is_lossy = True
        self.rig.do(ev.TierLost(Tier.HBM, True, "test"))

    def _look_at_puts(self) -> None:
        for call in [call for call in self.puts if call in self.rig.answers]:
            (chain, session), result = self.puts.pop(call), self.rig.answer(call)
            if isinstance(result, PutResult):
                assert 0 not in result.outcomes
                told = zip(chain, result.outcomes, strict=True)
                stored = {h for h, o in told if o in (PutOutcome.STORED, PutOutcome.DEDUPLICATED)}
                if session:
                    self.decoding |= {h for h in stored if self._is_readable(h)}

    def _is_readable(self, prefix_hash: bytes) -> bool:
        catalog = self.rig.planner.catalog
        row = catalog.find(self.rig.namespace_id, prefix_hash)
        return row >= 0 and catalog.tier_of(row) is not None

    @invariant()
    def a_decoding_session_loses_nothing(self) -> None:
        if not self.is_decoding:
            self.decoding = {h for h in self.decoding if self._is_readable(h)}
        elif not self.is_lossy:
            assert all(self._is_readable(h) for h in self.decoding)

    @invariant()
    def no_child_is_left_behind(self) -> None:
        """Who left a tier, and cannot be read any more, has left nobody behind."""
        for notice in self.rig.notices[self.num_notices :]:
            for name in notice.prefix_hashes if notice.change is BlockChange.REMOVED else ():
                is_gone = not self.is_lossy and name in NEXT and not self._is_readable(name)
                assert not (is_gone and self._is_readable(NEXT[name])), (name.hex()[:8], notice.reason)
        self.num_notices = len(self.rig.notices)

    @invariant()
    def every_answer_comes_once(self) -> None:
        for answers in self.rig.answers.values():
            lasts = [a for a in answers if not isinstance(a, AcquireResult) or a.last]
            assert len(lasts) <= 1
            assert not lasts or answers[-1] is lasts[0]

    @invariant()
    def only_committed_blocks_are_found(self) -> None:
        for chain in CHAINS:
            found = self.rig.planner.lookup(self.rig.namespace_id, chain)
            assert not isinstance(found, Refusal)
            assert set(chain[: found.num_blocks]) <= self.committed

    @invariant()
    def what_a_lease_was_told_is_there(self) -> None:
        for call, chain in self.acquires.items():
            for result in self.rig.answers[call]:
                for ready in result.ready:
                    assert self.rig.published[ready.tier, ready.place] == chain[ready.block]

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert len(self.rig.planner.waiting) <= 3

    @invariant()
    def holds_are_those_of_leases_and_copies(self) -> None:
        catalog = self.rig.planner.catalog
        leased = sum(len(r.ready) for call in self.acquires for r in self.rig.answers[call])
        sources = sum(len(c.items) for c in self.rig.copies if c.source is not None)
        arriving = sum(sum(state == 1 for state in states) for states in catalog.state)
        assert sum(sum(holds) for holds in catalog.holds) == leased + sources + arriving

    def teardown(self) -> None:
        """Everybody leaves, everything ends: nothing is held."""
        if not hasattr(self, "rig"):
            return
        self.rig.settle()
        self.rig.do(ev.ClientGone(CLIENT, "died"))
        self.rig.settle()
        self.rig.tick(20.0)
        self.rig.settle()
        planner = self.rig.planner
        assert sum(sum(holds) for holds in planner.catalog.holds) == 0
        assert sum(planner.catalog.num_keepers) == 0
        assert not any(planner.core.transitions.arriving_bytes.values())
        assert len(planner.leases) == len(planner.waiting) == len(planner.pins) == 0
        assert GEOMETRY.num_groups == 2


PlannerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPlanner = PlannerMachine.TestCase


def _steps(machine: PlannerMachine, rng: Random) -> list[Callable[[], object]]:
    """Return what may happen next, once each; of what matters most, twice."""
    chain, length = rng.choice(CHAINS), rng.randint(1, 4)
    return [
        partial(machine.put, chain, length, "d"),
        partial(machine.put, chain, length, ""),
        machine.end_all_copies,
        machine.end_all_copies,
        partial(machine.acquire, chain, length, float("inf")),
        lambda: machine.acquires and machine.release(rng.randrange(6), twice=rng.random() < 0.3),
        partial(machine.update_session, rng.choice([Urgency.DECODING, Urgency.IDLE])),
        partial(machine.end_session, rng.random() < 0.5),
        partial(machine.pin, chain, rng.choice(STANDARD_TIERS)),
        partial(machine.prefetch, chain, rng.choice([Tier.HBM, Tier.DRAM])),
        partial(machine.evict, rng.choice([Tier.HBM, Tier.DRAM])),
        partial(machine.wait, rng.choice([0.1, 1.0, 4.0])),
    ]


@pytest.mark.parametrize("nvme_blocks", [0, 2], ids=["no nvme", "nvme"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_long_random_sequence(eviction: str, nvme_blocks: int) -> None:
    """The same rules for each policy by itself, in long sequences without faults: nothing may get lost."""
    rng = Random(f"{eviction} {nvme_blocks}")
    machine = PlannerMachine()
    machine.begin(eviction, "all", rng.choice(["", *sorted(PREFETCH)]), nvme_blocks, has_faults=False)
    for _ in range(100):
        rng.choice(_steps(machine, rng))()
        machine.a_decoding_session_loses_nothing()
        machine.no_child_is_left_behind()
        machine.every_answer_comes_once()
        machine.only_committed_blocks_are_found()
        machine.what_a_lease_was_told_is_there()
        machine.holds_are_those_of_leases_and_copies()
    machine.teardown()
