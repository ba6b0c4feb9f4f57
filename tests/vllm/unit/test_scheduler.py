"""Sessions, urgency and resets in the scheduler's half."""

import pytest

from kvtier.clients import Retention, Urgency
from kvtier.clients.vllm.plan import Ack, Acks, Again
from kvtier.clients.vllm.scheduler.lookups import SessionUpdate

from .scheduler_scene import MISS, PENDING, Scene, hit, loading, request


@pytest.fixture
def scene() -> Scene:
    return Scene()


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


def test_what_a_request_says_of_its_tokens_goes_with_lookups_and_saves(scene: Scene) -> None:
    one = request()
    one.kv_hints = {"actions": [retain(80), {"action_type": "kv.fetch"}]}
    scene.side.arrived(one)
    assert scene.agent.asked[0].question.retention == (Retention(90),)
    scene.agent.asked[0].answer = hit(0, 0)
    scene.side.matched_tokens(one, 0)
    assert scene.plan(one, 40, [1, 2, 3, 4, 5]).saves[0].retention == (Retention(90),)
    assert scene.counters.take()["hints_ignored"] == 1


def retain(priority: int) -> dict[str, object]:
    payload = {"directives": [{"priority": priority}]}
    return {"action_type": "kv.retain", "action_version": "1.0", "payload": payload}


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
