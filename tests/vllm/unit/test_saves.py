"""Which blocks the scheduler's half plans to save, and when."""

import pytest

from kvtier.clients.vllm.plan import Ack, Acks, Again, StepPlan
from kvtier.clients.vllm.scheduler.agent import FAILED
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer

from .engine import Request
from .scheduler_scene import GROUPS, MISS, PENDING, WINDOWED, Scene, clock, hit, loading, request


@pytest.fixture
def scene() -> Scene:
    return Scene()


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
