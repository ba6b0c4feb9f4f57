"""The urgency policy: what it does with what it learned, hints, and its books."""

import math
from random import Random

import numpy as np
import pytest

from kvtier.policies.base import EvictionPolicy, Newcomer, SessionChange, Use, Victim
from kvtier.policies.baselines.lru import LruEviction
from kvtier.policies.options import BadPolicyOption
from kvtier.policies.urgency import forecast as forecasts
from kvtier.policies.urgency.ages import (
    NUM_BINS,
    bin_of,
)
from kvtier.policies.urgency.forecast import Forecast, forecast_of
from kvtier.policies.urgency.policy import UrgencyAdmission, UrgencyEviction
from kvtier.policies.urgency.visits import NUM_GAPS, kind_of
from kvtier.tiers.block import Urgency

from .tree import Facts, Tree, chain_of, name, plant, surroundings_of


def hits_of(factory: type, num_requests: int) -> float:
    """Return the share of returning blocks found: scans between short conversations that always come back."""
    tree = Tree(factory, 120)
    hits = asked = 0
    for number in range(num_requests):
        tree.now += 2.0
        tree.request(chain_of("scan", number, length=12))
        if number >= 10:
            hits += tree.request(chain_of("talk", number - 10, length=4))
            asked += 3
        tree.request(chain_of("talk", number, length=3))
    return hits / asked


def test_it_learns_who_returns() -> None:
    """Ten conversations of three blocks fit, ten scans of twelve do not: LRU finds nobody."""
    assert hits_of(LruEviction, 300) == 0.0
    assert hits_of(UrgencyEviction, 300) > 0.5


def test_books_hold_at_every_step_and_ghosts_are_bounded() -> None:
    rng = Random(11)
    tree, forecast = plant(40)
    forecast._stretches.max_ghosts = 100
    for _ in range(600):
        tree.now += rng.expovariate(0.5)
        topic, length = rng.randrange(30), rng.randrange(1, 9)
        tree.request(chain_of("topic", topic, length=length) + chain_of(topic, rng.random(), length=2))
        assert not forecast.check_integrity()
        assert len(forecast._stretches.ghosts) <= 100
    assert forecast.num_stretches <= 40 + 100 + 1, "no stretch without a block or a ghost"


def test_sessions_without_blocks_are_forgotten_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a million sessions that ask for the same blocks would be remembered, with its last visit."""
    monkeypatch.setattr(forecasts, "MANY_SESSIONS", 20)
    tree, forecast = plant(40)
    forecast._stretches.max_ghosts = 50
    tree.request(chain_of("own", length=4), session=1)
    for session in range(2, 300):
        tree.request(chain_of("topic", session % 3, length=4), session=session)
    assert 1 in forecast._by_session, "its blocks are there"
    assert len(forecast._by_session) == len(forecast._to_review) <= 20 + 4
    for session in range(300, 600):
        tree.request(chain_of("new", session, length=4), session=session)
    assert 1 not in forecast._by_session, "neither its blocks nor their names are there"
    assert len(forecast._by_session) <= 40 // 4 + 50 // 4 + 20


def test_a_return_is_noticed_though_nothing_was_kept() -> None:
    tree, forecast = plant(8)
    tree.now = 10.0
    tree.request(chain_of("talk", length=4))
    for number in range(4):
        tree.request(chain_of("other", number, length=8))
    tree.now = 40.0
    assert tree.request(chain_of("talk", length=5)) == 0
    visit = forecast._visit
    assert visit is not None
    assert (visit.turn, visit.num_known, visit.last_gap_s) == (1, 4, 30.0)


def test_decoding_continues_a_visit_and_its_age_begins_anew() -> None:
    facts = Facts()
    forecast = Forecast(facts)
    parent = facts.add(name(0), -1, 0.0)
    forecast.stored([parent], Use(0.0, 1, 1, Urgency.PREFILL))
    young = forecast.price(parent, 0.0)
    for second in range(1, 6):
        row = facts.add(name(second), parent, float(second))
        forecast.stored([row], Use(float(second), 1, 1, Urgency.DECODING))
        parent = row
    assert forecast.price(0, 5.0) == pytest.approx(young, rel=0.5)
    assert forecast._visit is not None
    assert forecast._visit.num_blocks == 6
    assert not forecast.check_integrity()


def one_session() -> tuple[Forecast, int, int]:
    """Return a forecast with one block of session 1, and one of session 2, used at 0 s."""
    facts = Facts()
    forecast = Forecast(facts)
    rows = [facts.add(name(number), -1, 0.0) for number in (1, 2)]
    for session, row in enumerate(rows, 1):
        forecast.stored([row], Use(0.0, session, 1, Urgency.PREFILL))
    return forecast, rows[0], rows[1]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_use_waits_for_its_put_though_others_make_room_for_it(is_lost: bool) -> None:
    """What is used and what is put behind it are one visit; of blocks that are gone nothing is to wait."""
    facts = Facts()
    forecast = Forecast(facts)
    talk, other = (facts.add(name(number), -1, 0.0) for number in (1, 2))
    for session, row in enumerate((talk, other), 1):
        forecast.stored([row], Use(0.0, session, 1, Urgency.PREFILL))
    forecast.used([talk], Use(9.0, 1, 2, Urgency.QUEUED))
    forecast.forgotten([talk if is_lost else other])
    assert (forecast._pending is None) == is_lost
    assert not forecast.check_integrity()
    if not is_lost:
        row = facts.add(name(3), talk, 9.0)
        forecast.stored([row], Use(9.0, 1, 1, Urgency.PREFILL))
        stretch = forecast._stretches.of_row
        assert forecast._stretches.visit[stretch[row]] is forecast._stretches.visit[stretch[talk]]


def test_an_announced_return_is_as_far_off_by_a_clock_that_is_ahead() -> None:
    forecast, mine, _ = one_session()
    for _ in range(400):  # 20 s by that clock, at one instant
        forecast.used([mine], Use(1.0, 1, 1, Urgency.QUEUED))
    forecast.session_changed(SessionChange(1.0, 1, Urgency.WAITING, back_at=31.0))
    visit = forecast._visit
    assert visit is not None
    assert visit.said_at > 15.0
    assert visit.back_at - visit.said_at == pytest.approx(30.0)


def test_blocks_of_an_ended_session_are_worth_little() -> None:
    forecast, mine, other = one_session()
    forecast.session_changed(SessionChange(1.0, 1, Urgency.ENDED))
    assert forecast.price(mine, 1.0) < forecast.price(other, 1.0) / 100


def test_who_is_back_is_learned_as_what_it_was_while_it_was_away() -> None:
    """A runtime that says "queued" on arrival must not teach that those who said "waiting" never return."""
    forecast, mine, _ = one_session()
    forecast.session_changed(SessionChange(1.0, 1, Urgency.WAITING))
    waiting = forecast._stretches.description_of(forecast._stretches.of_row[mine])
    price = forecast.price(mine, 9.0)
    forecast.session_changed(SessionChange(9.0, 1, Urgency.QUEUED))
    assert forecast._stretches.description_of(forecast._stretches.of_row[mine]) == waiting
    assert forecast.price(mine, 9.0) > 5 * price, "it needs its blocks at once"
    forecast.session_changed(SessionChange(9.0, 1, Urgency.IDLE))
    assert forecast._stretches.description_of(forecast._stretches.of_row[mine]) != waiting


def test_an_announced_return_is_believed_until_it_is_long_overdue() -> None:
    forecast, mine, other = one_session()
    forecast.session_changed(SessionChange(1.0, 1, Urgency.WAITING, back_at=31.0))
    forecast.session_changed(SessionChange(1.0, 2, Urgency.WAITING))
    forecast.used([other], Use(1.0, 2, 1, Urgency.QUEUED))  # time passes when something happens
    forecast.used([other], Use(30.0, 2, 1, Urgency.QUEUED))
    close = forecast.price(mine, 30.0)
    late = forecast.price(mine, 40.0)
    assert late > 0.9 / 9, "late, and still believed"
    forecast.used([other], Use(100.0, 2, 1, Urgency.QUEUED))
    assert close > 5 * forecast.price(mine, 100.0)


def test_a_new_block_has_the_price_that_it_will_have() -> None:
    facts = Facts()
    forecast = Forecast(facts)
    names = [name("new", number) for number in range(5)]
    newcomer = Newcomer(3.0, -1, 0, 5, 1, Urgency.PREFILL, names)
    asked = forecast.price_of_new(newcomer)
    rows = [facts.add(name("new", number), number - 1, 3.0) for number in range(5)]
    forecast.stored(rows, Use(3.0, 1, 5, Urgency.PREFILL))
    assert forecast.price(rows[0], 3.0) == pytest.approx(asked, rel=1e-5)


def opinionated(facts: Facts) -> Forecast:
    """Return a forecast for which every feature matters: otherwise all prices before learning are one."""
    rng = np.random.default_rng(4)
    forecast = Forecast(facts)
    dump = forecast.dump()
    hazards = dump["hazards"]
    hazards["effects"] = rng.uniform(-0.4, 0.4, len(hazards["effects"])).tolist()
    hazards["at_risk"] = rng.uniform(50, 100, (len(hazards["used"]), NUM_BINS)).tolist()
    hazards["used"] = rng.uniform(0.5, 2, (len(hazards["used"]), NUM_BINS)).tolist()
    forecast.load(dump)
    return forecast


def arrive(forecast: Forecast, facts: Facts, now: float, names: list[bytes]) -> tuple[float, list[int]]:
    """Ask for the price of a chain of new blocks, then store it. Returns the price and the rows."""
    asked = forecast.price_of_new(Newcomer(now, -1, 0, len(names), 1, Urgency.PREFILL, names))
    rows: list[int] = []
    for each in names:
        rows.append(facts.add(each, rows[-1] if rows else -1, now))
    forecast.stored(rows, Use(now, 1, len(names), Urgency.PREFILL))
    return asked, rows


def test_what_is_stored_after_its_bytes_were_copied_is_one_visit_with_what_asked_for_room() -> None:
    """Asked for twice, every new prompt would be one that LRU finds again, and LRU would be followed."""
    facts = Facts()
    forecast = opinionated(facts)
    for number in range(20):
        names, now = chain_of(number, length=4), 10.0 * number
        forecast.price_of_new(Newcomer(now, -1, 0, 4, number, Urgency.PREFILL, names))
        rows = [facts.add(names[0], -1, now)]
        rows += [facts.add(each, rows[0] + place, now) for place, each in enumerate(names[1:])]
        forecast.stored(rows, Use(now + 0.005, number, 4, Urgency.PREFILL))
    assert forecast._fallback._num_asked == 20 * 4
    assert forecast._fallback._num_lost == 0
    again = chain_of("again", length=4)
    for now in (300.0, 301.0):  # declined both times: the second one is a return
        forecast.price_of_new(Newcomer(now, -1, 0, 4, 0, Urgency.PREFILL, again))
        forecast.declined(Newcomer(now, -1, 0, 4, 0, Urgency.PREFILL, again))
    assert forecast._fallback._num_asked == 22 * 4


def test_a_long_put_that_asks_for_room_step_by_step_is_one_visit() -> None:
    facts = Facts()
    forecast = opinionated(facts)
    names = chain_of("long", length=9)
    whole = Newcomer(1.0, -1, 0, 9, 1, Urgency.PREFILL, names)
    forecast.price_of_new(whole)
    row = facts.add(names[0], -1, 1.0)
    for number in range(1, 9):
        rest = whole.after(number)._replace(now=1.0 + number / 100, parent=row)
        forecast.price_of_new(rest)
        row = facts.add(names[number], row, 1.0)
    assert forecast._fallback._num_asked == 9
    forecast.price_of_new(whole._replace(now=2.0))
    assert forecast._fallback._num_asked == 18, "who asks for all of it asks again"
    forecast.price_of_new(Newcomer(2.5, row, 9, 1, 1, Urgency.PREFILL, chain_of("other", length=1)))
    assert forecast._fallback._num_asked == 19


def test_the_price_of_a_newcomer_is_its_own() -> None:
    facts = Facts()
    forecast = opinionated(facts)
    asked, rows = arrive(forecast, facts, 3.0, chain_of("new", length=5))
    assert forecast.price(rows[0], 3.0) == pytest.approx(asked, rel=1e-5)
    longer, rows = arrive(forecast, facts, 3.0, chain_of("longer", length=60))
    assert forecast.price(rows[0], 3.0) == pytest.approx(longer, rel=1e-5)
    assert longer != pytest.approx(asked, rel=1e-3)
    other = Newcomer(3.0, -1, 0, 9, 2, Urgency.PREFILL, chain_of("other", length=9))
    assert forecast.price_of_new(other) != pytest.approx(longer, rel=1e-3)
    fork = Newcomer(3.0, rows[3], 4, 2, 3, Urgency.PREFILL, chain_of("fork", length=2))
    assert forecast.price_of_new(fork) != pytest.approx(forecast.price_of_new(other), rel=1e-3)


def test_the_price_of_a_ghost_that_returns_is_that_of_a_return() -> None:
    facts = Facts()
    forecast = opinionated(facts)
    names = chain_of("talk", length=5)
    first, rows = arrive(forecast, facts, 3.0, names)
    forecast.forgotten(rows)
    for row in reversed(rows):
        facts.remove(row)
    again, rows = arrive(forecast, facts, 50.0, names)
    # The gap that its return ends is learned in between (rates.py), the first one of all.
    assert forecast.price(rows[0], 50.0) == pytest.approx(again, rel=0.03)
    assert again != pytest.approx(first, rel=0.1)


def test_a_block_without_a_past_has_one_price_alone_and_among_others() -> None:
    """As after a restart: only its last use is known."""
    facts = Facts()
    forecast = opinionated(facts)
    rows = [facts.add(name(number), -1, -float(3**number)) for number in range(9)]
    for follows_age in (False, True):
        forecast._appraiser.follows_age = follows_age
        together = forecast.prices(np.array(rows, np.int32), 0.0)
        assert together == pytest.approx([forecast.price(row, 0.0) for row in rows], rel=1e-5)
        assert len(set(together.tolist())) > 4


def test_a_declined_return_is_a_use_that_is_learned_from() -> None:
    facts = Facts()
    forecast = Forecast(facts)
    newcomer = Newcomer(5.0, -1, 0, 1, 1, Urgency.PREFILL, [name(1)])
    forecast.price_of_new(newcomer)
    forecast.declined(newcomer)
    assert sum(forecast._appraiser._seen.uses) == 0.0
    back = newcomer._replace(now=65.0)
    forecast.price_of_new(back)
    forecast.declined(back)
    assert forecast._appraiser._seen.uses[-1] == 1.0
    assert forecast._appraiser._seen.bins[-1] == bin_of(60.0)


def test_every_fork_makes_the_beginning_more_shared() -> None:
    tree, forecast = plant(100)
    kinds = []
    for number in range(5):
        tree.request(chain_of("system", length=4) + chain_of(number, length=2))
        row = tree.rows[chain_of("system", length=4)[0]]
        kinds.append(forecast._stretches.kind[forecast._stretches.of_row[row]])
    assert kinds == [0, *(kind_of(forks) for forks in (1, 2, 3, 4))]


def test_the_mean_gap_is_over_all_uses_of_the_blocks_stored_or_not() -> None:
    tree, forecast = plant(8)
    for at in (10.0, 40.0, 200.0, 500.0):
        tree.now = at
        tree.request(chain_of("talk", length=4))
        if at == 40.0:  # it leaves, and is back as a ghost
            tree.request(chain_of("other", length=8))
    forecast._settle_pending()
    stretches = forecast._stretches
    stretch = stretches.of_row[tree.rows[chain_of("talk", length=4)[0]]]
    assert stretches.num_uses[stretch] == 3
    assert stretches.known_s[stretch] == pytest.approx(490.0)
    assert stretches.description_of(stretch)[-NUM_GAPS:][2] == 1 + bin_of(490.0 / 3)


def test_blocks_with_the_past_of_the_victim_leave_with_it_however_prices_are_rounded() -> None:
    """A price made with others, or at another instant, differs in its last digits from one made by itself."""
    for age_s in (0.06, 0.13, 0.21, 0.33, 0.44):
        facts = Facts()
        surroundings = surroundings_of(facts)
        policy, forecast = UrgencyEviction(surroundings), forecast_of(surroundings)
        rows: list[int] = []
        for each in chain_of("talk", length=6):
            rows.append(facts.add(each, rows[-1] if rows else -1, 0.0))
        for observer in (forecast, policy):
            observer.stored(rows, Use(0.0, 0, 7, Urgency.PREFILL))  # more is to come: it has no tail yet
        policy.offer(rows[-1:], age_s)
        victim = policy.choose(age_s)
        assert victim is not None
        above = rows[-2::-1]
        assert policy.num_no_dearer(above, victim.price, age_s + 0.04) == len(above), "dearer by a bit"
        policy.forgotten(rows[-1:])
        one_by_one = EvictionPolicy.num_no_dearer(policy, above, victim.price, age_s + 0.04)
        assert policy.num_no_dearer(above, victim.price, age_s + 0.04) == one_by_one, "nobody was chosen"


def test_shared_blocks_keep_their_price_when_a_session_ends() -> None:
    tree, forecast = plant(100)
    for number in range(1, 6):
        tree.request(chain_of("system", length=4) + chain_of(number, length=4), session=number)
    shared, own = tree.rows[chain_of("system", length=4)[0]], tree.rows[chain_of(5, length=4)[0]]
    before = forecast.price(shared, tree.now), forecast.price(own, tree.now)
    forecast.session_changed(SessionChange(tree.now, 5, Urgency.ENDED))
    assert forecast.price(shared, tree.now) == before[0]
    assert forecast.price(own, tree.now) < before[1] / 100


@pytest.mark.parametrize(("num_blocks", "weight"), [(3, math.sqrt(2 / 8)), (33, 2.0), (1001, math.sqrt(8))])
def test_a_long_prompt_weighs_the_root_of_its_blocks_up_to_a_limit(num_blocks: int, weight: float) -> None:
    facts = Facts()
    forecast = Forecast(facts)
    rows = arrive(forecast, facts, 1.0, chain_of("long", length=num_blocks))[1]
    forecast.used(rows[:-1], Use(4.0, 1, num_blocks - 1, Urgency.QUEUED))
    forecast.used(rows[:1], Use(5.0, 1, 1, Urgency.QUEUED))  # now it is known that nothing follows
    seen = forecast._appraiser._seen
    uses = [w for use, w in zip(seen.uses, seen.weights, strict=True) if use]
    assert uses[0] == pytest.approx(weight)


def test_admission_compares_worth_per_byte_at_the_newcomer_s_place() -> None:
    class TwoSizes(Facts):
        def block_bytes(self, row: int) -> int:
            return super().block_bytes(row) * (1 + row)

    facts = TwoSizes()
    small, large = facts.add(name(0), -1, 0.0), facts.add(name(1), -1, 0.0)
    facts.namespace_id[large] = 2
    surroundings = surroundings_of(facts)
    admission, forecast = UrgencyAdmission(surroundings), forecast_of(surroundings)
    newcomer = Newcomer(0.0, small, 1, 1, 0, Urgency.PREFILL, [name(2)])
    price = forecast.price_of_new(newcomer)
    per_byte = facts.block_tokens(small) / facts.block_bytes(small)
    assert admission.admits(newcomer, Victim(large, price * per_byte)), "worth as much: it may come in"
    assert not admission.admits(newcomer, Victim(large, price * per_byte * 1.001))


def test_for_seconds_a_late_newcomer_is_worth_more() -> None:
    facts = Facts()
    row = facts.add(name(0), -1, 0.0)
    surroundings = surroundings_of(facts, options={"objective": "seconds"})
    admission, forecast = UrgencyAdmission(surroundings), forecast_of(surroundings)
    early = Newcomer(0.0, row, 1, 1, 1, Urgency.PREFILL, [name(2)])
    late = Newcomer(0.0, row, 20_000, 1, 2, Urgency.PREFILL, [name(3)])
    price = forecast.price_of_new(early) * UrgencyEviction(surroundings)._values.at(row, 10_000)
    assert not admission.admits(early, Victim(row, price))
    assert admission.admits(late, Victim(row, price))


def test_admission_declines_what_is_worth_less_and_remembers_it() -> None:
    facts = Facts()
    surroundings = surroundings_of(facts)
    admission = UrgencyAdmission(surroundings)
    forecast = forecast_of(surroundings)
    row = facts.add(name(0), -1, 0.0)
    forecast.stored([row], Use(0.0, 1, 1, Urgency.PREFILL))
    newcomer = Newcomer(5.0, -1, 0, 1, 2, Urgency.PREFILL, [name(1)])
    assert admission.admits(newcomer, None)
    assert admission.admits(newcomer, Victim(row, 0.0))
    assert not admission.admits(newcomer, Victim(row, 1e9))
    assert name(1) in forecast._stretches.ghosts
    assert not forecast.check_integrity()


def test_a_price_is_that_of_the_moment_also_when_it_was_asked_for_at_the_same_instant() -> None:
    tree, _ = plant(100)
    tree.request(chain_of(1, length=4), session=1)
    row = tree.rows[chain_of(1, length=4)[0]]
    before = tree.policy.price(row, tree.now)
    for observer in tree.observers:
        observer.session_changed(SessionChange(tree.now, 1, Urgency.ENDED))
    after = tree.policy.price(row, tree.now)
    assert after < before / 100
    for observer in tree.observers:
        observer.forgotten([row])
    assert tree.policy.price(row, tree.now) > 10 * after, "nothing is known of it any more"


def test_the_objective_weighs_positions() -> None:
    facts = Facts()
    row = -1
    for number in range(2000):
        row = facts.add(name(number), row, 0.0)
    for_tokens = UrgencyEviction(surroundings_of(facts))
    for_seconds = UrgencyEviction(surroundings_of(facts, options={"objective": "seconds"}))
    assert for_tokens.price(0, 9.0) == for_tokens.price(row, 9.0)
    assert for_seconds.price(0, 9.0) < for_seconds.price(row, 9.0)
    with pytest.raises(BadPolicyOption, match="objective"):
        UrgencyEviction(surroundings_of(facts, options={"objective": "fame"}))
