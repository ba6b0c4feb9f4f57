"""Retention hints: priorities per token range, their end, and who leaves first."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.events import RetentionHint
from kvtier.appliance.core.results import PutOutcome
from kvtier.policies.admission import AdmitAll
from kvtier.policies.base import DEFAULT_PRIORITY, AdmissionPolicy, Newcomer, Surroundings, Victim
from kvtier.policies.registry import ADMISSION, EVICTION, PolicyChoice
from kvtier.tiers.block import Tier

from ..rig import CLIENT, GEOMETRY, STORED, Rig, hashes

TOKENS = GEOMETRY.block_tokens
HIGH, LOW = RetentionHint(0, 0, 90), RetentionHint(0, 0, 5)


def priorities(rig: Rig, chain: list[bytes]) -> list[int]:
    catalog = rig.planner.catalog
    return [catalog.retention(catalog.find(rig.namespace_id, name), rig.now) for name in chain]


def in_dram(rig: Rig, chain: list[bytes]) -> int:
    return sum("dram" in rig.where(name) for name in chain)


def test_ranges_are_tokens_of_the_chain_and_the_last_one_counts() -> None:
    rig = Rig(dram_blocks=8)
    chain = hashes("a", 5)
    rig.put(chain[:2])
    hints = [RetentionHint(0, 0, 80), RetentionHint(3 * TOKENS, 4 * TOKENS, 10), RetentionHint(0, 1, 100)]
    rig.put(chain[2:], chain[1], retention=hints)
    assert priorities(rig, chain) == [50, 50, 80, 10, 80]
    rig.answer(rig.acquire(chain, retention=hints))
    assert priorities(rig, chain) == [100, 80, 80, 10, 80]
    rig.acquire(chain, retention=[RetentionHint(2 * TOKENS, 3 * TOKENS, DEFAULT_PRIORITY)])
    assert priorities(rig, chain) == [100, 80, 50, 10, 80]


@pytest.mark.parametrize("policy", sorted(EVICTION))
def test_low_goes_before_high_whatever_the_policy(policy: str) -> None:
    if policy.startswith("clairvoyant"):
        pytest.skip("needs a future")
    rig = Rig(dram_blocks=6, nvme_blocks=0, policies=PolicyChoice(eviction=policy))
    high, low, plain = hashes("high", 2), hashes("low", 2), hashes("plain", 2)
    rig.put(high, retention=[HIGH])
    rig.now = 1.0
    rig.put(plain)
    rig.now = 2.0
    rig.put(low, retention=[LOW])
    rig.now = 3.0
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, GEOMETRY.block_bytes * 2))
    assert (in_dram(rig, high), in_dram(rig, plain), in_dram(rig, low)) == (2, 2, 0)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, GEOMETRY.block_bytes * 2))
    assert (in_dram(rig, high), in_dram(rig, plain)) == (2, 0)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert in_dram(rig, high) == 0, "a priority is a wish, not a pin"


def test_when_the_ttl_has_passed_a_block_is_like_any_other() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=0)
    first, second = hashes("first", 2), hashes("second", 2)
    rig.put(first, retention=[RetentionHint(0, 0, 90, 10.0)])
    rig.now = 1.0
    rig.put(second)
    assert rig.planner.next_deadline() == 10.0
    rig.tick(20.0)
    assert priorities(rig, first) == [50, 50]
    assert not rig.planner.catalog.retained
    rig.put(hashes("third", 2))
    assert (in_dram(rig, first), in_dram(rig, second)) == (0, 2)


def test_a_longer_ttl_takes_the_place_of_a_shorter_one() -> None:
    rig = Rig()
    chain = hashes("a", 1)
    rig.put(chain, retention=[RetentionHint(0, 0, 90, 5.0)])
    for _ in range(3000):
        rig.planner.retention.apply([0], [RetentionHint(0, 0, 90, 50.0 + _)])
    assert len(rig.planner.retention._ends) < 2500, "ends that do not count are dropped"
    rig.tick(10.0)
    assert priorities(rig, chain) == [90]


def test_a_forgotten_block_leaves_no_priority_behind() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=0)
    rig.put(hashes("a", 2), retention=[RetentionHint(0, 0, 5, 100.0)])
    rig.put(hashes("b", 2))
    assert not rig.planner.catalog.retained
    assert priorities(rig, hashes("b", 2)) == [50, 50]


def test_a_refused_put_gives_no_priority() -> None:
    rig = Rig()
    rig.put(hashes("a", 2)[1:], hashes("a", 1)[0], retention=[HIGH])
    assert not rig.planner.catalog.retained
    assert CLIENT in rig.planner.leases.clients


class Doorkeeper(AdmissionPolicy):
    """Welcomes nobody, as the urgency policy does where everything stored is worth more."""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        return False


class Porter(Doorkeeper):
    """Welcomes everybody, and is not AdmitAll."""

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        return True


def doors_of_nvme(surroundings: Surroundings) -> AdmissionPolicy:
    """Return the policy of a tier: only nvme admits nothing."""
    return (Doorkeeper if surroundings.tier is Tier.NVME else AdmitAll)(surroundings)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADMISSION, "nobody", Doorkeeper)
    monkeypatch.setitem(ADMISSION, "everybody", Porter)
    monkeypatch.setitem(ADMISSION, "nobody on nvme", doors_of_nvme)


@pytest.mark.usefixtures("doors")
@pytest.mark.parametrize("count", [1, 20])
def test_admission_honours_priorities(count: int) -> None:
    """A put with a high priority was declined by a policy that had never heard of it."""
    rig = Rig(dram_blocks=count, nvme_blocks=0, policies=PolicyChoice(admission="nobody"))
    plain, high, low = hashes("plain", count), hashes("high", count), hashes("low", count)
    rig.put(plain)
    assert set(rig.put(hashes("other", count))) == {PutOutcome.DECLINED}
    assert set(rig.put(high, retention=[HIGH])) == {STORED}
    assert in_dram(rig, high) == count
    assert set(rig.put(low, retention=[LOW])) == {PutOutcome.DECLINED}
    assert set(rig.put(hashes("equal", count), retention=[HIGH])) == {STORED}, "equals by the time of use"


@pytest.mark.usefixtures("doors")
def test_nobody_of_a_lower_priority_takes_a_place() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=0, policies=PolicyChoice(admission="everybody"))
    high = hashes("high", 2)
    rig.put(high, retention=[RetentionHint(0, 0, 90, 10.0)])
    assert set(rig.put(hashes("plain", 2))) == {PutOutcome.DECLINED}
    rig.tick(11.0)
    assert set(rig.put(hashes("later", 2))) == {STORED}, "the priority has ended"


@pytest.mark.usefixtures("doors")
def test_what_stands_before_a_priority_comes_in_with_it() -> None:
    rig = Rig(dram_blocks=3, nvme_blocks=0, policies=PolicyChoice(admission="nobody"))
    for number in range(3):
        rig.put(hashes(f"plain{number}", 1))
    chain = hashes("a", 3)
    outcomes = rig.put(chain, retention=[RetentionHint(TOKENS, 2 * TOKENS, 90)])
    assert outcomes == [STORED, STORED, PutOutcome.DECLINED]


@pytest.mark.usefixtures("doors")
def test_a_cold_store_that_admits_nobody_takes_what_has_a_priority() -> None:
    policies = PolicyChoice(admission="nobody on nvme")
    rig = Rig(dram_blocks=2, nvme_blocks=4, policies=policies)
    plain, high = hashes("plain", 1), hashes("high", 1)
    rig.put(plain)
    rig.put(high, retention=[HIGH])
    for number in range(3):
        rig.put(hashes(f"other{number}", 1))
        rig.settle()
    assert rig.where(high[0])
    assert not rig.where(plain[0])
