"""Shares of bandwidth: who goes next on an edge. A server without a clock, or with a virtual one."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvtier.appliance.config import Tenant, bandwidth_shares_of
from kvtier.appliance.core.instructions import Copy
from kvtier.appliance.transfer.fair_queue import MAX_IDLE_TAGS, BandwidthShares, FairQueue
from kvtier.appliance.transfer.lanes import MAX_BATCH_BYTES, Edge, EdgeQueue, QueuedCopy
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Tier, Urgency

from ..conftest import small_settings
from ..loops import DaemonThread

MIB = 1 << 20


@dataclass
class Piece:
    """What waits, in place of a batch."""

    key: tuple[int, float, int, int]
    tenant: str
    num_bytes: int = MIB


@dataclass
class Bench:
    """A queue that numbers what is pushed and is audited after every step."""

    weights: dict[str, float]
    queue: FairQueue[Piece] = field(init=False)
    num_pushed: int = 0

    def __post_init__(self) -> None:
        shares = BandwidthShares()
        shares.adopt(self.weights)
        self.queue = FairQueue(shares)

    def push(self, tenant: str, num_bytes: int = MIB, urgency: int = 2, deadline_at: float = 9.0) -> Piece:
        self.num_pushed += 1
        piece = Piece((urgency, deadline_at, 0, self.num_pushed), tenant, num_bytes)
        self.queue.push(piece)
        self.check()
        return piece

    def pop(self) -> Piece:
        piece = self.queue.pop()
        self.check()
        return piece

    def check(self) -> None:
        assert self.queue.check_integrity() == []

    def served(self, count: int) -> Counter[str]:
        """Serve `count` pieces; return the bytes of each tenant."""
        found: Counter[str] = Counter()
        for _ in range(count):
            piece = self.pop()
            found[piece.tenant] += piece.num_bytes
        return found


def test_two_who_always_have_work_get_what_their_shares_say() -> None:
    bench = Bench({"large": 3.0, "small": 1.0})
    for _ in range(400):
        bench.push("small", num_bytes=MIB // 2)  # smaller pieces, and they came first: neither may matter
    for _ in range(400):
        bench.push("large", num_bytes=2 * MIB)
    served: Counter[str] = Counter()
    for _ in range(300):
        served += bench.served(1)
        ahead = served["large"] / 3 - served["small"]
        assert abs(ahead) <= 2 * MIB / 3 + MIB / 2, "further apart than a piece of each"
    assert served["large"] / served["small"] == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_fair_whatever_the_pieces_are(seed: int, comes_back: bool) -> None:
    """Four tenants, pieces of all sizes, refilled as they go: the bound of the paper holds at every moment at
    which all of them wait. `comes_back`: what is left of large ones after a mebibyte, as after a turn."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    weights = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.5}
    bench, served = Bench(weights), Counter[str]()
    for tenant in weights:
        for _ in range(3):
            bench.push(tenant, rng.randint(1, 4 * MIB))
    for _ in range(2_000):
        piece = bench.pop()
        if comes_back and piece.num_bytes > MIB:
            rest = replace(piece, num_bytes=piece.num_bytes - MIB)
            bench.queue.refund(rest)
            bench.check()
            bench.queue.push(rest)
            served[piece.tenant] += MIB
        else:
            served[piece.tenant] += piece.num_bytes
            bench.push(piece.tenant, rng.randint(1, 4 * MIB))
        per_weight = {tenant: served[tenant] / weight for tenant, weight in weights.items()}
        for one, other in (("a", "b"), ("c", "d"), ("a", "d"), ("b", "c")):
            bound = 4 * MIB / weights[one] + 4 * MIB / weights[other]
            assert abs(per_weight[one] - per_weight[other]) <= bound


def test_who_was_idle_has_saved_nothing_up() -> None:
    bench = Bench({})
    for _ in range(200):
        bench.push("busy")
    assert bench.served(100) == {"busy": 100 * MIB}
    for _ in range(50):
        bench.push("late")
    served = bench.served(40)
    assert abs(served["late"] - served["busy"]) <= MIB, "a hundred pieces of credit would have gone first"


def test_who_was_alone_pays_nothing_for_it() -> None:
    """The other half: what `busy` had while nobody else wanted it is not held against it."""
    bench = Bench({})
    for _ in range(100):
        bench.push("busy")
    bench.served(100)
    for _ in range(20):
        bench.push("late")
        bench.push("busy")
    served = bench.served(20)
    assert abs(served["late"] - served["busy"]) <= MIB


def test_a_small_tenant_does_not_wait_for_a_long_queue() -> None:
    """A thousand pieces of another tenant wait; a load of the small one is next or second."""
    bench = Bench({"large": 100.0})
    for _ in range(1000):
        bench.push("large", num_bytes=4 * MIB)
    bench.served(10)
    bench.push("small", num_bytes=MIB // 4)
    assert "small" in bench.served(2)


def test_urgency_goes_before_shares_and_deadlines_before_arrival() -> None:
    bench = Bench({"large": 100.0})
    for _ in range(5):
        bench.push("large", urgency=4)
    bench.push("small", urgency=4)
    later = bench.push("small", urgency=1, deadline_at=8.0)
    sooner = bench.push("small", urgency=1, deadline_at=7.0)
    assert [bench.pop(), bench.pop()] == [sooner, later]


def test_what_is_taken_out_costs_nothing_and_comes_back_where_it_belongs() -> None:
    bench = Bench({})
    mine = [bench.push("mine", urgency=4) for _ in range(6)]
    for _ in range(6):
        bench.push("other", urgency=4)
    taken = bench.queue.take(lambda piece: piece.tenant == "mine")
    bench.check()
    assert taken == mine
    assert len(bench.queue) == 6
    for piece in taken[:3]:
        piece.key = (0, *piece.key[1:])
        bench.queue.push(piece)
    assert [bench.pop() for _ in range(3)] == mine[:3]
    for piece in taken[3:]:
        bench.queue.push(piece)
    served = bench.served(4)
    assert served == {"mine": 2 * MIB, "other": 2 * MIB}


def test_idle_tenants_are_forgotten() -> None:
    bench = Bench({})
    for number in range(20 * MAX_IDLE_TAGS):
        for tenant in ("resident", f"passer-by {number}"):
            bench.push(tenant)
        bench.served(1 + number % 3 // 2 if len(bench.queue) > 2 else 1)
    (one,) = bench.queue._classes.values()
    assert len(one.tags) <= MAX_IDLE_TAGS + 2 * len(one.waiting) + 1
    bench.served(len(bench.queue))
    assert not one.tags


def test_a_share_of_nothing_waits_for_nobody() -> None:
    bench = Bench({"large": 1000.0, "tiny": 0.001})
    for _ in range(10):
        bench.push("tiny")
    assert bench.served(10) == {"tiny": 10 * MIB}


def _label(namespace_id: int, num_bytes: int) -> FragmentLabel:
    return FragmentLabel(b"n" * 32, namespace_id, bytes(32), b"", 0, 0, num_bytes)


def test_a_spill_of_several_tenants_is_cut_between_them() -> None:
    shares = BandwidthShares({1: "tenant:red", 2: "tenant:blue", 3: "tenant:red/eu"}.__getitem__)
    lane = EdgeQueue(Edge(Tier.DRAM, Tier.NVME), 1, shares)
    owners = [1, 1, 3, 2, 2, 1]
    items = [CopyItem(n, n, _label(owner, 1000)) for n, owner in enumerate(owners)]
    copy = Copy(1, Tier.DRAM, Tier.NVME, items, Urgency.IDLE)
    job = QueuedCopy(copy, [CopyOutcome(Cause.CANCELLED)] * len(items))
    lane.enqueue(job, iter(range(100)))
    found = sorted((batch.start, batch.stop, batch.tenant, batch.num_bytes) for batch in lane.queue)
    expected = [(0, 3, "tenant:red", 3000), (3, 5, "tenant:blue", 2000), (5, 6, "tenant:red", 1000)]
    assert found == expected
    assert job.num_open == 3


def test_on_a_slow_edge_a_small_tenant_s_load_takes_its_share_of_time() -> None:
    """A virtual edge of 1 GiB/s and one batch at a time: 64 MiB of a tenant that has 6 GiB of another before
    it in the queue, with equal shares, are there after twice the time they take alone."""
    shares = BandwidthShares({1: "tenant:large", 2: "tenant:small"}.__getitem__)
    lane = EdgeQueue(Edge(Tier.NVME, Tier.DRAM), 1, shares)
    sequence = iter(range(1 << 20))
    for number, (owner, num_items) in enumerate([(1, 1536), (2, 16)]):
        items = [CopyItem(n, n, _label(owner, MAX_BATCH_BYTES)) for n in range(num_items)]
        copy = Copy(number, Tier.NVME, Tier.DRAM, items, Urgency.PREFILL)
        lane.enqueue(QueuedCopy(copy, []), sequence)
    now_s, done_at_s = 0.0, 0.0
    for _ in range(200):
        batch = lane.queue.pop()
        now_s += batch.num_bytes / (1 << 30)
        if batch.tenant == "tenant:small":
            done_at_s = now_s
    alone_s = 16 * MAX_BATCH_BYTES / (1 << 30)
    assert alone_s < done_at_s <= 2 * alone_s + MAX_BATCH_BYTES / (1 << 30)


def _tenants(**shares: float) -> dict[str, Tenant]:
    given = {
        name: Tenant.model_validate({"members": [f"uid:{number}"], "bandwidth_share": share})
        for number, (name, share) in enumerate(shares.items(), 1000)
    }
    for number, share in ((1, 2.0), (2, 0.5)):
        values = {"members": [f"uid:{number}"], "sharing": "group:colours", "bandwidth_share": share}
        given[f"member-{number}"] = Tenant.model_validate(values)
    return given


def test_the_shares_of_a_group_add_up() -> None:
    shares = bandwidth_shares_of(_tenants(acme=3))
    assert shares == {"tenant:acme": 3.0, "group:colours": 2.5}


def test_a_daemon_follows_the_policy(tmp_path: Path) -> None:
    """The weights of its mover, at the start and after a reload; a tenant's divisions have its weight."""
    before = small_settings(tmp_path).model_copy(update={"tenants": _tenants(acme=3)})
    after = before.model_copy(update={"tenants": _tenants(acme=5, bolt=2)})
    with DaemonThread(before) as served:
        shares = served.daemon.appliance.mover.shares
        assert (shares.weight("tenant:acme"), shares.weight("tenant:bolt")) == (3.0, 1.0)
        served.call(lambda: [part(after) for part in served.daemon.reload.parts])
        assert (shares.weight("tenant:acme"), shares.weight("tenant:bolt")) == (5.0, 2.0)
        assert shares.named == {"tenant:acme", "tenant:bolt", "group:colours"}
