"""What the scheduler's half promises to the engine, one hook at a time."""

import pytest

from kvtier.clients import Tier
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import Ack, Acks, StepPlan
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer, PendingLookup

from .engine import Request
from .scheduler_scene import GROUPS, MISS, PENDING, WINDOWED, Scene, clock, hit, loading, request


@pytest.fixture
def scene() -> Scene:
    return Scene()


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
    assert scene.agent.num_silent == 0, "the daemon has answered: what is late is room, or the disk"


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
