"""The scheduler's half, one hook at a time, with a clock and an agent that the test holds in its hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.clients import Tier, Urgency
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import Ack, Acks, Again, StepPlan
from kvtier.clients.vllm.scheduler.agent import FAILED
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer, LookupRequest, PendingLookup, SessionUpdate
from kvtier.clients.vllm.scheduler.saving import Saver
from kvtier.clients.vllm.scheduler.side import SchedulerSide

from .engine import HASH_TOKENS, Request

GROUPS = [Group(0, 8, 8 // HASH_TOKENS)]
WINDOWED = [GROUPS[0], Group(1, 4, 1, window_tokens=10)]
MISS, PENDING = (0, False), (None, False)


class LookupAgent:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.asked: list[PendingLookup] = []
        self.released: list[PendingLookup] = []
        self.told: list[tuple[str, SessionUpdate]] = []
        self.answers_while_waited_for: dict[int, tuple[LookupAnswer | None, float]] = {}
        self.is_open = False
        self.num_silent = 0

    def allows(self) -> bool:
        return not self.is_open

    def ask(self, question: LookupRequest) -> PendingLookup:
        self.asked.append(PendingLookup(question, clock.now))
        return self.asked[-1]

    def wait(self, asked: PendingLookup, timeout_s: float) -> None:
        """Time passes until the answer comes, if it comes."""
        answer, needs_s = self.answers_while_waited_for.pop(id(asked), (None, timeout_s))
        clock.now += min(needs_s, timeout_s)
        if needs_s <= timeout_s:
            asked.answer = answer

    def silent(self) -> None:
        self.num_silent += 1

    def release(self, asked: PendingLookup) -> None:
        assert asked not in self.released
        self.released.append(asked)

    def tell(self, session: str, word: SessionUpdate) -> None:
        self.told.append((session, word))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


class Held:
    """saving.Holder."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.local: set[bytes] = set()  # names of blocks in the engine's own cache

    def hold(self, block_ids: Sequence[int]) -> None:
        self.blocks += block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.blocks.remove(block)

    def has(self, name: bytes) -> bool:
        return name in self.local


class Scene:
    def __init__(self, groups: list[Group] = GROUPS, num_ranks: int = 1, **options: Any) -> None:
        clock.now = 0.0
        self.agent, self.held, self.counters = LookupAgent(), Held(), Counters()
        saver = Saver(groups, num_ranks, 20, self.held, self.counters)
        self.side = SchedulerSide(
            Options(target="x", **options), groups, self.agent, saver, self.counters, engine="e", clock=clock
        )

    def plan(self, request: Request, num_tokens: int, *tables: list[int]) -> StepPlan:
        plan = StepPlan()
        self.side.plan(plan, {request.request_id: num_tokens}, lambda _: tables)
        assert self.side.check_integrity() == []
        return plan


@pytest.fixture
def scene() -> Scene:
    return Scene()


def request(num_tokens: int = 40, name: str = "r") -> Request:
    return Request(name, list(range(num_tokens)), num_tokens)


def hit(num_tokens: int, *stored: int, tiers: tuple[Tier, ...] = ()) -> LookupAnswer:
    return LookupAnswer(num_tokens, stored or (num_tokens // 8,), tiers or (Tier.DRAM,) * (num_tokens // 8))


def loading(scene: Scene, answer: LookupAnswer) -> Request:
    """Return a request whose load has begun."""
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = answer
    scene.side.matched_tokens(one, 0)
    scene.side.allocated(one, ([1, 2, 3, 4, 5],), 40)
    return one


# ------------------------------------------------------------------------------------------- promises


def test_nothing_is_promised_before_it_is_pinned(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    assert len(scene.agent.asked) == 1
    assert scene.side.matched_tokens(one, 0) == PENDING
    assert scene.side.matched_tokens(one, 0) == PENDING
    scene.agent.asked[0].answer = hit(32)
    assert scene.side.matched_tokens(one, 0) == (32, True)
    assert scene.side.matched_tokens(one, 0) == (32, True)  # asked again: nothing has changed
    assert scene.side.matched_tokens(one, 16) == (16, True)
    assert len(scene.agent.asked) == 1
    assert not scene.agent.released


def test_an_answer_that_comes_at_once_is_waited_for_so_that_requests_start_together(scene: Scene) -> None:
    two = [request(name="a"), request(name="b")]
    for one in two:
        scene.side.arrived(one)
    first, second = scene.agent.asked
    scene.agent.answers_while_waited_for[id(first)] = (hit(32), 0.0005)
    scene.agent.answers_while_waited_for[id(second)] = (hit(16), 0.0005)
    assert [scene.side.matched_tokens(one, 0) for one in two] == [(32, True), (16, True)]


def test_a_step_waits_no_longer_than_it_may_for_all_its_requests(scene: Scene) -> None:
    started_at = clock.now
    many = [request(name=str(number)) for number in range(5)]
    for one in many:
        scene.side.arrived(one)
        assert scene.side.matched_tokens(one, 0) == PENDING
    limit_s = Options().answer_wait_s
    assert clock.now - started_at == pytest.approx(limit_s)
    scene.side.plan(StepPlan(), {}, lambda _: None)
    assert scene.side.matched_tokens(many[0], 0) == PENDING
    assert clock.now - started_at == pytest.approx(2 * limit_s), "the next step may wait again"
    scene.agent.asked[1].is_pinned = True
    scene.side.plan(StepPlan(), {}, lambda _: None)
    assert scene.side.matched_tokens(many[1], 0) == PENDING
    assert clock.now - started_at == pytest.approx(2 * limit_s), "nor for what is still coming up"


def test_a_hit_is_loaded_under_its_lease_until_every_rank_is_done(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = hit(40)
    assert scene.side.matched_tokens(one, 8) == (32, True)
    scene.side.allocated(one, ([9, 5, 6, 7, 8],), 32)
    plan = StepPlan()
    scene.side.plan(plan, {}, lambda _: None)
    (load,) = plan.loads
    (part,) = load.parts
    assert (part.first_block, part.block_ids) == (1, [5, 6, 7, 8])
    assert part.hashes == b"".join(GROUPS[0].chain(one.block_hashes))
    assert not scene.agent.released
    scene.side.loaded({"r"}, set())
    assert scene.agent.released == scene.agent.asked
    scene.side.allocated(one, ([9, 5, 6, 7, 8],), 0)  # the engine calls a second time
    assert len(scene.agent.released) == 1


def arrive(scene: Scene, one: Request, num_tokens: int = 40) -> PendingLookup:
    """A request whose blocks are pinned and on their way up."""
    scene.side.arrived(one)
    asked = scene.agent.asked[-1]
    asked.is_pinned, asked.arriving = True, hit(num_tokens, tiers=(Tier.NVME,) * 5)
    return asked


def test_one_load_may_begin_while_its_blocks_are_on_their_way_up(scene: Scene) -> None:
    first, second = request(name="a"), request(name="b")
    asked = arrive(scene, first)
    arrive(scene, second)
    assert scene.side.matched_tokens(first, 0) == (40, True)
    assert scene.side.matched_tokens(second, 0) == (40, True), "nothing is begun before it is allocated"
    scene.side.allocated(first, ([1, 2, 3, 4, 5],), 40)
    assert scene.side.hit_sources(first, 40) == {"disk": 40}
    assert scene.side.matched_tokens(second, 0) == PENDING
    plan = scene.plan(first, 0, [])
    (load,) = plan.loads
    assert (load.is_arriving, len(load.parts)) == (True, 1)
    asked.answer = hit(40)
    assert scene.side.matched_tokens(second, 0) == PENDING, "the load is not over"
    assert not scene.agent.released
    scene.side.loaded({"a"}, set())
    assert scene.agent.released == [asked]
    assert scene.side.matched_tokens(second, 0) == (40, True)
    assert scene.side.check_integrity() == []
    assert scene.counters.take()["hits_early"] == 1


def test_an_early_load_that_fails_is_asked_for_again_and_waited_for(scene: Scene) -> None:
    """A record may turn out damaged: what is before it is still worth a load."""
    one = request()
    arrive(scene, one)
    scene.side.matched_tokens(one, 0)
    scene.side.allocated(one, ([1, 2, 3, 4, 5],), 40)
    scene.side.loaded({"r"}, {"r"})
    assert scene.side.matched_tokens(one, 0) == PENDING
    again = scene.agent.asked[1]
    again.is_pinned, again.arriving = True, hit(40)
    assert scene.side.matched_tokens(one, 0) == PENDING
    again.answer = hit(16)
    assert scene.side.matched_tokens(one, 0) == (16, True)
    scene.side.allocated(one, ([1, 2, 3, 4, 5],), 16)
    scene.side.loaded({"r"}, {"r"})
    assert scene.side.matched_tokens(one, 0) == MISS
    assert len(scene.agent.asked) == 2


def test_what_has_a_deadline_or_may_not_be_early_waits_for_all_of_it(scene: Scene) -> None:
    hurried = request()
    hurried.kv_transfer_params = {"kvtier_deadline_s": 0.5}
    arrive(scene, hurried)
    assert scene.side.matched_tokens(hurried, 0) == PENDING
    scene = Scene(max_arriving_loads=0)
    one = request()
    arrive(scene, one)
    assert scene.side.matched_tokens(one, 0) == PENDING


def test_an_aborted_early_load_makes_room_for_the_next_when_it_is_over(scene: Scene) -> None:
    first, second = request(name="a"), request(name="b")
    arrive(scene, first)
    scene.side.matched_tokens(first, 0)
    scene.side.allocated(first, ([1, 2, 3, 4, 5],), 40)
    scene.side.finished(first, ([],))
    arrive(scene, second)
    assert scene.side.matched_tokens(second, 0) == PENDING
    scene.side.loaded({"a"}, set())
    assert scene.side.matched_tokens(second, 0) == (40, True)
    assert scene.side.check_integrity() == []


def test_a_failed_load_is_not_tried_again(scene: Scene) -> None:
    one = loading(scene, hit(40))
    scene.side.loaded({"r"}, {"r"})
    assert scene.side.matched_tokens(one, 0) == MISS
    assert len(scene.agent.asked) == 1
    assert scene.counters.take()["misses_load_failed"] == 1


def test_silence_is_a_miss_after_a_time(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    clock.now = 5.0  # time in the queue costs nobody anything
    assert scene.side.matched_tokens(one, 0) == PENDING
    clock.now = 5.9
    assert scene.side.matched_tokens(one, 0) == PENDING
    clock.now = 6.1
    assert scene.side.matched_tokens(one, 0) == MISS
    assert (scene.agent.num_silent, len(scene.agent.released)) == (1, 1)
    assert scene.side.matched_tokens(one, 0) == MISS
    assert scene.counters.take() == {"lookups": 1, "misses_timeout": 1}


def test_blocks_on_their_way_up_are_given_more_time(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].is_pinned = True
    assert scene.side.matched_tokens(one, 0) == PENDING
    clock.now = 5.5
    assert scene.side.matched_tokens(one, 0) == PENDING
    clock.now = 6.5
    assert scene.side.matched_tokens(one, 0) == MISS


def test_a_deadline_of_the_caller_bounds_the_wait(scene: Scene) -> None:
    one = request()
    one.kv_transfer_params = {"kvtier_deadline_s": 0.5}
    scene.side.arrived(one)
    assert scene.agent.asked[0].question.deadline_s == 0.5
    scene.agent.asked[0].is_pinned = True
    assert scene.side.matched_tokens(one, 0) == PENDING
    clock.now = 1.4  # the daemon has a second more to say what came up in time
    assert scene.side.matched_tokens(one, 0) == PENDING
    clock.now = 1.6
    assert scene.side.matched_tokens(one, 0) == MISS


def test_an_open_breaker_asks_nobody(scene: Scene) -> None:
    scene.agent.is_open = True
    one = request()
    scene.side.arrived(one)
    assert scene.side.matched_tokens(one, 0) == MISS
    assert not scene.agent.asked
    assert scene.counters.take() == {"misses_breaker": 1}


def test_who_arrived_while_the_breaker_was_open_is_asked_for_when_its_turn_comes(scene: Scene) -> None:
    scene.agent.is_open = True
    one = request()
    scene.side.arrived(one)
    scene.agent.is_open = False
    assert scene.side.matched_tokens(one, 0) == PENDING
    assert len(scene.agent.asked) == 1
    assert scene.counters.take() == {"lookups": 1}


def test_a_lost_lease_is_asked_for_again_but_not_for_ever(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    for number in range(1, 4):
        scene.agent.asked[-1].answer = hit(40)
        scene.agent.asked[-1].is_lost = True
        answer = scene.side.matched_tokens(one, 0)
        assert answer == (PENDING if number < 3 else MISS)
    assert len(scene.agent.asked) == 3
    assert len(scene.agent.released) == 3


def test_a_pin_that_begins_behind_the_engines_own_blocks_is_renewed(scene: Scene) -> None:
    """On arrival the engine had two blocks; until it was scheduled one of them was evicted."""
    local = scene.held.local
    local.update(GROUPS[0].chain(request().block_hashes)[:2])
    one = request()
    scene.side.arrived(one)
    assert scene.agent.asked[0].question.first_token == 16
    scene.agent.asked[0].answer = hit(40)
    assert scene.side.matched_tokens(one, 8) == PENDING
    assert scene.agent.asked[1].question.first_token == 8


def test_early_leases_are_bounded_and_the_scheduler_is_not(scene: Scene) -> None:
    scene = Scene(max_early_leases=2)
    crowd = [request(name=f"r{number}") for number in range(5)]
    for one in crowd:
        scene.side.arrived(one)
    assert len(scene.agent.asked) == 2
    assert [scene.side.matched_tokens(one, 0) for one in crowd] == [PENDING] * 5
    assert len(scene.agent.asked) == 5


def test_a_request_that_may_not_use_the_cache_does_not(scene: Scene) -> None:
    one = request()
    one.skip_reading_prefix_cache = True
    scene.side.arrived(one)
    scene.agent.asked[0].answer = hit(40)
    assert scene.side.matched_tokens(one, 0) == MISS
    assert len(scene.agent.released) == 1


def test_prompts_shorter_than_a_block_are_not_asked_for(scene: Scene) -> None:
    one = request(7)
    scene.side.arrived(one)
    assert scene.side.matched_tokens(one, 0) == MISS
    assert not scene.agent.asked


def test_small_gains_are_not_loaded() -> None:
    scene = Scene(min_load_tokens=16)
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = hit(32)
    assert scene.side.matched_tokens(one, 24) == MISS
    assert len(scene.agent.released) == 1


def test_preemption_starts_anew(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = LookupAnswer(0, (0,), cause="misses_nothing_stored")
    assert scene.side.matched_tokens(one, 0) == MISS
    one.num_preemptions = 1
    one.tokens += range(8)
    assert scene.side.matched_tokens(one, 0) == PENDING
    assert len(scene.agent.asked[-1].question.hashes) == 12


def test_an_abort_during_a_load_keeps_the_lease_until_it_is_over(scene: Scene) -> None:
    one = loading(scene, hit(40))
    scene.side.finished(one, ([],))
    assert not scene.agent.released
    scene.side.loaded({"r"}, set())
    assert len(scene.agent.released) == 1
    assert scene.side.check_integrity() == []


def test_hits_are_told_by_tier(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = hit(40, tiers=(Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.NVME, Tier.NVME))
    scene.side.matched_tokens(one, 8)
    assert scene.side.hit_sources(one, 32) == {"host": 8, "disk": 24}


def test_a_step_that_is_prefill_of_one_request_says_what_its_blocks_took(scene: Scene) -> None:
    def shares(one: Request, num_tokens: int, *others: int) -> list[float]:
        plan, scheduled = StepPlan(), {one.request_id: num_tokens}
        scheduled |= {f"other {number}": others[number] for number in range(len(others))}
        scene.side.plan(plan, scheduled, lambda _: [list(range(1, 200))])
        one.num_computed_tokens += num_tokens
        for save in plan.saves:
            scene.side.saved(Acks({save.job: Ack(1, len(save.block_ids))}))
        return [save.prefill_share for save in plan.saves]

    scene = Scene()
    scene.side._saver._max_blocks = 200
    long = request(1000, "long")
    scene.side.arrived(long)
    assert shares(long, 400) == [1.0]
    assert shares(long, 380, 10, 10) == [pytest.approx(376 / 400)], "the last 4 tokens fill no block"
    assert shares(long, 64) == [0.0], "too few to tell"
    long.tokens += range(8)
    assert shares(long, 164) == [0.0], "the last ones are decoded"
    shared = request(1000, "shared")
    shared.tokens[0] = 7
    scene.side.arrived(shared)
    assert shares(shared, 400, 100) == [0.0], "others took too much of it"


def test_a_window_loads_its_end_only() -> None:
    scene = Scene(WINDOWED)
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = hit(40, 5, 10)
    assert scene.side.matched_tokens(one, 0) == (40, True)
    scene.side.allocated(one, ([1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0, 0, 6, 7, 8]), 40)
    plan = StepPlan()
    scene.side.plan(plan, {}, lambda _: None)
    full, window = plan.loads[0].parts
    assert (full.first_block, full.block_ids) == (0, [1, 2, 3, 4, 5])
    assert (window.first_block, window.block_ids) == (7, [6, 7, 8])
    assert len(window.hashes) == 10 * 32


# --------------------------------------------------------------------------------------------- saves


def test_each_block_is_saved_in_the_step_that_fills_it(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    names = GROUPS[0].chain(one.block_hashes)
    (save,) = scene.plan(one, 20, [1, 2, 3]).saves
    assert (save.parent, save.hashes, save.block_ids) == (b"", names[0] + names[1], [1, 2])
    assert scene.held.blocks == [1, 2]
    one.num_computed_tokens = 20
    (save,) = scene.plan(one, 20, [1, 2, 3, 4, 5]).saves
    assert (save.parent, save.hashes, save.block_ids) == (names[1], b"".join(names[2:5]), [3, 4, 5])
    scene.side.saved(Acks({1: Ack(1, 2)}))
    assert scene.held.blocks == [3, 4, 5]
    assert scene.side.is_busy
    scene.side.saved(Acks({2: Ack(1, 3)}))
    assert not scene.held.blocks
    assert not scene.side.is_busy


def test_blocks_are_held_until_every_rank_has_answered() -> None:
    scene = Scene(num_ranks=2)
    one = request()
    scene.side.arrived(one)
    scene.plan(one, 40, [1, 2, 3, 4, 5])
    scene.side.saved(Acks({1: Ack(1, 5)}))
    assert len(scene.held.blocks) == 5
    scene.side.finished(one, ([],))
    scene.side.saved(Acks({1: Ack(1, 5)}))
    assert not scene.held.blocks


def test_nobody_saves_what_is_stored_or_under_way(scene: Scene) -> None:
    first, second = request(name="a"), request(name="b")
    for one in (first, second):
        scene.side.arrived(one)
    assert len(scene.plan(first, 40, [1, 2, 3, 4, 5]).saves) == 1
    assert scene.plan(second, 40, [6, 7, 8, 9, 10]).saves == []
    third = request(name="c")
    scene.side.arrived(third)
    scene.agent.asked[-1].answer = hit(24)
    scene.side.saved(Acks({1: Ack(1, 5)}))
    scene.side.matched_tokens(third, 0)  # the lookup says: evicted behind the third block
    (save,) = scene.plan(third, 40, [11, 12, 13, 14, 15]).saves
    assert save.block_ids == [14, 15]


@pytest.mark.parametrize(
    ("again", "blocks"), [(Again.NOTHING, []), (Again.REST, [3, 4]), (Again.ALL, [1, 2, 3, 4])]
)
def test_what_was_refused_is_tried_again_where_that_helps(
    scene: Scene, again: Again, blocks: list[int]
) -> None:
    one = request(44)
    scene.side.arrived(one)
    scene.plan(one, 32, [1, 2, 3, 4])
    scene.side.saved(Acks({1: Ack(1, 2 if again is not Again.ALL else 0, again)}))
    one.num_computed_tokens = 32
    saves = scene.plan(one, 2, [1, 2, 3, 4, 5]).saves
    assert [block for save in saves for block in save.block_ids] == blocks
    assert scene.held.blocks == blocks


def test_orphans_begin_anew_at_the_start_of_their_chain(scene: Scene) -> None:
    """The appliance was restarted: the parent of a block that has just been filled is gone."""
    one = request(48)
    scene.side.arrived(one)
    scene.plan(one, 32, [1, 2, 3, 4])
    scene.side.saved(Acks({1: Ack(1, 4)}))
    one.num_computed_tokens = 32
    scene.plan(one, 8, [1, 2, 3, 4, 5])
    scene.side.saved(Acks({2: Ack(1, 0, Again.ALL)}))
    scene.side._saver.forget_all()  # as a lookup would have told
    one.num_computed_tokens = 40
    (save,) = scene.plan(one, 8, [1, 2, 3, 4, 5, 6]).saves
    assert (save.parent, save.block_ids) == (b"", [1, 2, 3, 4, 5, 6])


def test_a_run_behind_stored_blocks_names_the_block_before_it(scene: Scene) -> None:
    one, other = request(48), request(24, "other")
    for each in (one, other):
        scene.side.arrived(each)
    names = GROUPS[0].chain(one.block_hashes)
    scene.plan(other, 24, [7, 8, 9])
    (save,) = scene.plan(one, 48, [1, 2, 3, 4, 5, 6]).saves
    assert (save.parent, save.block_ids) == (names[2], [4, 5, 6])


def test_retries_end(scene: Scene) -> None:
    one = request(44)
    scene.side.arrived(one)
    num_saves = 0
    for job in range(1, 20):
        num_saves += len(scene.plan(one, 32, [1, 2, 3, 4]).saves)
        scene.side.saved(Acks({job: Ack(1, 0, Again.REST)}))
    assert num_saves == 4


def test_what_is_held_is_bounded(scene: Scene) -> None:
    one, two = request(160, "a"), Request("b", list(range(500, 540)), 40)
    for other in (one, two):
        scene.side.arrived(other)
    scene.plan(one, 144, list(range(1, 19)))
    (save,) = scene.plan(two, 40, [31, 32, 33, 34, 35]).saves
    assert save.block_ids == [31, 32]  # of 20 in all
    assert scene.plan(two, 40, [31, 32, 33, 34, 35]).saves == []
    scene.side.saved(Acks({1: Ack(1, 18)}))
    (save,) = scene.plan(two, 40, [31, 32, 33, 34, 35]).saves  # the rest, later
    assert save.block_ids == [33, 34, 35]
    assert save.parent == GROUPS[0].chain(two.block_hashes)[1]


def test_what_is_left_at_the_end_is_saved_as_far_as_there_is_room(scene: Scene) -> None:
    one, two = request(144, "a"), Request("b", list(range(500, 540)), 40)
    for other in (one, two):
        scene.side.arrived(other)
    scene.plan(one, 144, list(range(1, 19)))
    two.num_computed_tokens = 40
    scene.side.finished(two, ([31, 32, 33, 34, 35],))
    assert scene.counters.take()["saves_skipped_backpressure"] == 3
    assert scene.held.blocks[-2:] == [31, 32]  # before the engine frees them
    assert scene.side.is_busy
    plan = StepPlan()
    scene.side.plan(plan, {}, lambda _: None)
    assert [save.block_ids for save in plan.saves] == [[31, 32]]


def test_a_request_that_ends_while_it_is_loaded_saves_nothing(scene: Scene) -> None:
    one = loading(scene, hit(40, 2))
    one.num_computed_tokens = 40  # promised, not there
    scene.side.finished(one, ([1, 2, 3, 4, 5],))
    assert scene.held.blocks == []


def test_a_block_that_is_gone_ends_the_saves_of_its_group() -> None:
    scene = Scene(WINDOWED)
    one = request()
    scene.side.arrived(one)
    saves = scene.plan(one, 40, [1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0, 0, 6, 7, 8]).saves
    assert [save.group for save in saves] == [0]
    assert scene.counters.take()["saves_skipped_gap"] == 10


def test_tokens_that_are_not_verified_are_not_saved(scene: Scene) -> None:
    """With speculative decoding a step computes more than will be kept."""
    one = request(30)
    scene.side.arrived(one)
    one.num_computed_tokens = 29
    (save,) = scene.plan(one, 5, [1, 2, 3, 4, 5]).saves
    assert save.block_ids == [1, 2, 3]


def test_prompts_only_if_so_configured() -> None:
    scene = Scene(save="prompt")
    one = request(20)
    scene.side.arrived(one)
    one.tokens += range(20)
    (save,) = scene.plan(one, 40, [1, 2, 3, 4, 5]).saves
    assert save.block_ids == [1, 2]


def test_an_adapter_without_a_digest_saves_nothing(scene: Scene) -> None:
    class Lora:
        lora_path = "/adapters/a"

    one = request()
    one.lora_request = Lora()
    scene.side.arrived(one)
    assert scene.agent.asked[0].question.adapter_path == "/adapters/a"
    assert scene.plan(one, 40, [1, 2, 3, 4, 5]).saves == []
    scene.agent.asked[0].answer = LookupAnswer(0, (0,), adapter=bytes(32), cause="misses_nothing_stored")
    scene.side.matched_tokens(one, 0)
    (save,) = scene.plan(one, 40, [1, 2, 3, 4, 5]).saves
    assert save.adapter == bytes(32)


def test_who_was_not_answered_long_ago_is_asked_for_again(scene: Scene) -> None:
    """The appliance was away when the request came; its turn comes seconds later."""
    soon, late = request(name="soon"), request(name="late")
    for one in (soon, late):
        scene.side.arrived(one)
    for asked in scene.agent.asked:
        asked.answer = FAILED
    clock.now = 1.9
    assert scene.side.matched_tokens(soon, 0) == MISS, "nobody has told that it is back"
    clock.now = 2.1
    assert scene.side.matched_tokens(late, 0) == PENDING
    scene.agent.asked[2].answer = hit(32)
    assert scene.side.matched_tokens(late, 0) == (32, True)
    assert scene.side.check_integrity() == []


def test_who_is_never_answered_is_computed_in_the_end(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    for number in range(3):
        scene.agent.asked[number].answer = FAILED
        clock.now += 2.1
        answer = scene.side.matched_tokens(one, 0)
    assert answer == MISS
    assert len(scene.agent.asked) == 3


# ------------------------------------------------------------------------------------------ lifecycle


def test_urgency_follows_the_request(scene: Scene) -> None:
    one = request(16)
    scene.side.arrived(one)
    scene.plan(one, 10, [1, 2])
    one.num_computed_tokens = 10
    scene.plan(one, 6, [1, 2])
    one.num_computed_tokens = 16
    one.tokens.append(1)
    scene.plan(one, 1, [1, 2, 3])
    one.num_computed_tokens = 17
    scene.plan(one, 1, [1, 2, 3])
    scene.side.finished(one, ([],))
    assert scene.agent.told == [
        ("e/r", SessionUpdate(Urgency.PREFILL)),
        ("e/r", SessionUpdate(Urgency.DECODING)),
        ("e/r", SessionUpdate(Urgency.ENDED, num_decoded_tokens=1, is_last=True)),
    ]


def test_a_prompt_of_one_step_is_told_about_once(scene: Scene) -> None:
    one = request(16)
    scene.side.arrived(one)
    scene.plan(one, 16, [1, 2])
    assert scene.agent.told == []
    one.num_computed_tokens = 16
    one.tokens.append(1)
    scene.plan(one, 1, [1, 2, 3])
    assert scene.agent.told == [("e/r", SessionUpdate(Urgency.DECODING))]


@pytest.mark.parametrize("may_load", [True, False])
@pytest.mark.parametrize("may_save", [True, False])
def test_a_request_may_opt_out(scene: Scene, may_load: bool, may_save: bool) -> None:
    """Of being looked up, of being stored; of both, and the appliance never hears of it."""
    one = request()
    one.kv_transfer_params = {"kvtier_load": may_load, "kvtier_save": may_save}
    scene.side.arrived(one)
    assert len(scene.agent.asked) == may_load
    if may_load:
        scene.agent.asked[0].answer = hit(0, 0)
    assert scene.side.matched_tokens(one, 0) == MISS
    saves = [save for _ in range(2) for save in scene.plan(one, 40, [1, 2, 3, 4, 5]).saves]
    assert len(saves) == may_save
    scene.side.finished(one, ([1, 2, 3, 4, 5],))
    assert bool(scene.agent.told) == (may_load or may_save)


def test_a_named_session_waits_for_its_next_turn(scene: Scene) -> None:
    one = request(16)
    one.kv_transfer_params = {"kvtier_session": "chat", "kvtier_returns_in_s": 3}
    scene.side.arrived(one)
    scene.side.finished(one, ([],))
    assert scene.agent.told == [("chat", SessionUpdate(Urgency.WAITING, back_in_s=3.0))]


def test_after_a_reset_nothing_old_is_promised_or_skipped(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = hit(40)
    scene.side.matched_tokens(one, 0)
    scene.side.reset("salt")
    assert scene.side.matched_tokens(one, 0) == PENDING
    assert scene.agent.asked[-1].question.salt == "salt"
    plan = scene.plan(one, 40, [1, 2, 3, 4, 5])
    assert plan.salt == "salt"
    assert plan.saves[0].block_ids == [1, 2, 3, 4, 5]


def test_what_was_computed_before_a_reset_is_not_stored_after_it(scene: Scene) -> None:
    """The reset may mean other weights: a running request's blocks, and those that a finished one has left
    for the next step, would be found by everybody under the new salt."""
    running, done = request(name="running"), request(name="done")
    for one in (running, done):
        scene.side.arrived(one)
    running.num_computed_tokens = done.num_computed_tokens = 24
    scene.side.finished(done, ([1, 2, 3],))
    assert scene.held.blocks == [1, 2, 3]
    scene.side.reset("salt")
    assert scene.held.blocks == []
    plan = scene.plan(running, 16, [4, 5, 6, 7, 8])
    assert (plan.salt, plan.saves) == ("salt", [])
    running.num_computed_tokens = 40
    scene.side.finished(running, ([4, 5, 6, 7, 8],))
    assert scene.plan(request(name="later"), 0, []).saves == []


def test_what_was_loading_at_a_reset_is_not_stored_after_it(scene: Scene) -> None:
    one = loading(scene, hit(40, 3))
    scene.plan(one, 0, [])
    scene.side.reset("salt")
    scene.side.loaded(["r"], [])
    one.num_computed_tokens = 40
    one.tokens += range(8)
    assert scene.plan(one, 8, [1, 2, 3, 4, 5, 6]).saves == []


def test_a_save_that_fails_after_a_reset_is_not_tried_again(scene: Scene) -> None:
    one = request()
    scene.side.arrived(one)
    [save] = scene.plan(one, 40, [1, 2, 3, 4, 5]).saves
    one.num_computed_tokens = 40
    scene.side.reset("salt")
    scene.side.saved(Acks({save.job: Ack(1, 0, Again.ALL)}))
    assert scene.plan(one, 0, [1, 2, 3, 4, 5]).saves == []
