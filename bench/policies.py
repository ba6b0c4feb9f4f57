"""What a decision costs: microseconds per eviction and the longest pause, with a million candidates.

    python -m bench.policies [POLICY ...] [--candidates 1000000] [--told 50000] [--evictions 200000]

Every candidate is the second block of a chain of two. A policy is asked for a victim and for the price of
the block above it, hears what left, is offered what became a leaf, and is given a new chain for every chain
that is gone; for every four evictions some chain is used. So the number of candidates stays, and so does
the catalog of two million blocks. The first chains are there as after a restart: offered a thousand at a
time, and nobody saw them being stored. The last `--told` ones were stored by a request each, as are all that
come later: that is what a policy that learns takes most of its time for. Times are CPU times of the calls,
because other processes of the machine are not the policy's fault; the policy's share of Python's garbage
collection is in them.
"""

import argparse
import gc
import random
import sys
import time
from array import array
from typing import Any

from kvtier.policies.base import DEFAULT_PRIORITY, EvictionPolicy, Surroundings, Use
from kvtier.policies.costs import CostModel
from kvtier.policies.registry import EVICTION
from kvtier.tiers.block import Geometry, Tier, Urgency

from .machine import describe
from .table import render

GEOMETRY = Geometry(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")
REPLAY_ONLY = {"clairvoyant"}
BAR_US, BAR_MS = 5.0, 5.0
#: Evictions timed together: as many as the planner does in one step, and the CPU clock is slow to read.
BATCH = 64
OFFERED_TOGETHER = 1000


class Facts:
    """Columns of `num_chains` chains of two blocks: rows 2i and 2i + 1."""

    def __init__(self, num_chains: int) -> None:
        self.rng = random.Random(1)
        num_rows = 2 * num_chains
        self.prefix_hash = [self.rng.randbytes(32) for _ in range(num_rows)]
        self.namespace_id = array("H", [1]) * num_rows
        self.parent = array("i", [-1]) * num_rows
        self.first_child = array("i", [-1]) * num_rows
        self.next_sibling = array("i", [-1]) * num_rows
        self.position = array("i", [0, 1]) * num_chains
        self.last_used = array("d", [0.0]) * num_rows
        self.num_uses = array("I", [0]) * num_rows
        self.urgency = array("B", [Urgency.IDLE]) * num_rows
        self.has_retention = False
        for head in range(0, num_rows, 2):
            self.parent[head + 1] = head
            self.first_child[head] = head + 1

    def block_bytes(self, row: int) -> int:
        """Return the raw bytes of the block, all layers."""
        return GEOMETRY.block_bytes

    def block_tokens(self, row: int) -> int:
        """Return the tokens in the block."""
        return GEOMETRY.block_tokens

    def tier_of(self, row: int) -> Tier | None:
        """Return where the block is."""
        return Tier.DRAM

    def retention(self, row: int, now: float) -> int:
        """Return the priority of a block."""
        return DEFAULT_PRIORITY

    def rename(self, head: int) -> None:
        """Let the rows of a chain name another one."""
        for row in (head, head + 1):
            self.prefix_hash[row] = self.rng.randbytes(32)
            self.num_uses[row] = 0


class Rig:
    """A policy over a full tier."""

    def __init__(self, policy_name: str, num_chains: int, num_told: int) -> None:
        self.facts = Facts(num_chains)
        costs = CostModel(3e9, 1e-4)
        costs.add_namespace(1, GEOMETRY)
        self.shared: dict[str, Any] = {}
        capacity_bytes = 2 * num_chains * GEOMETRY.block_bytes
        surroundings = Surroundings(self.facts, costs, Tier.DRAM, capacity_bytes, shared=self.shared)
        self.policy: EvictionPolicy = EVICTION[policy_name](surroundings)
        learners = [each for each in self.shared.values() if hasattr(each, "used")]
        self.observers = [*learners, self.policy]
        self.now = 0.0
        self.spent_s = self.longest_s = 0.0
        self.num_evicted = 0
        first_told = 2 * max(0, num_chains - num_told)
        for first in range(0, first_told, 2 * OFFERED_TOGETHER):
            heads = range(first, min(first + 2 * OFFERED_TOGETHER, first_told), 2)
            self.now += 1e-3 * len(heads)
            for head in heads:
                self.facts.last_used[head] = self.facts.last_used[head + 1] = self.now
            self.policy.offer([head + 1 for head in heads], self.now)
        for head in range(first_told, 2 * num_chains, 2):
            self.store(head)

    def store(self, head: int) -> None:
        """Store a chain and offer its tail."""
        self.now += 1e-3
        self.facts.last_used[head] = self.facts.last_used[head + 1] = self.now
        for observer in self.observers:
            observer.stored([head, head + 1], Use(self.now, 0, 2, Urgency.PREFILL))
        self.policy.offer([head + 1], self.now)

    def use(self) -> None:
        """Use a chain, and offer its tail again, as the planner does when the request ends."""
        head = self.facts.rng.randrange(len(self.facts.parent)) & ~1
        self.now += 1e-3
        for observer in self.observers:
            observer.used([head, head + 1], Use(self.now, 0, 3, Urgency.QUEUED))
        for row in (head, head + 1):
            self.facts.last_used[row] = self.now
            self.facts.num_uses[row] += 1
        self.policy.offer([head + 1], self.now)

    def evict(self) -> int | None:
        """Evict a victim, and the block above it if it costs no more. Returns the chain that is gone.

        This is what is timed.
        """
        policy, now = self.policy, self.now
        victim = policy.choose(now)
        assert victim is not None, "there is always a candidate"
        head, run = victim.row & ~1, [victim.row]
        if victim.row != head and policy.price(head, now) <= victim.price:
            run.append(head)
        policy.left(run)
        for observer in self.observers:
            observer.forgotten(run)
        self.num_evicted += len(run)
        if run[-1] == head:
            return head
        policy.offer([head], now)
        return None

    def run(self, num_evictions: int, *, each: bool) -> None:
        """Evict, store and use; time the evictions together, or `each` by itself for the longest."""
        for _ in range(-(-num_evictions // BATCH)):
            for _ in range(BATCH // 4):
                self.use()
            gone = []
            began_at = time.thread_time()
            for _ in range(BATCH):
                if each:
                    call_at = time.thread_time()
                head = self.evict()
                if each:
                    self.longest_s = max(self.longest_s, time.thread_time() - call_at)
                if head is not None:
                    gone.append(head)
            self.spent_s += time.thread_time() - began_at
            for head in gone:
                self.facts.rename(head)
                self.store(head)


def measure(policy_name: str, num_candidates: int, num_told: int, num_evictions: int) -> list[str]:
    """Return a row of the table."""
    began_at = time.thread_time()
    rig = Rig(policy_name, num_candidates, num_told)
    setup_s = time.thread_time() - began_at
    gc.collect()
    gc.freeze()  # as the daemon does with a catalog that stays
    rig.run(num_evictions, each=False)
    us = rig.spent_s / rig.num_evicted * 1e6
    rig.run(num_evictions, each=True)
    ms = rig.longest_s * 1e3
    gc.unfreeze()
    is_met = us <= BAR_US and ms <= BAR_MS
    row = [policy_name, f"{len(rig.policy):,}", f"{us:.2f}", f"{ms:.2f}", "yes" if is_met else "no"]
    return [*row, f"{setup_s:.0f}"]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    real = sorted(set(EVICTION) - REPLAY_ONLY)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"of {', '.join(real)}; default: all")
    parser.add_argument("--candidates", type=int, default=1_000_000)
    parser.add_argument("--told", type=int, default=50_000, help="chains stored by a request each")
    parser.add_argument("--evictions", type=int, default=200_000)
    args = parser.parse_args()
    if unknown := set(args.policies) - set(real):
        parser.error(f"unknown policy {', '.join(sorted(unknown))}; known: {', '.join(real)}")
    command = f"python -m bench.policies {' '.join(args.policies)}".strip()
    command += f" --candidates {args.candidates} --told {args.told} --evictions {args.evictions}"
    print("\n".join(f"{label:9s}{value}" for label, value in {**describe({}), "command": command}.items()))
    gc.set_threshold(5_000, 50, 1_000_000)  # as the daemon does
    rows = []
    for each in args.policies or real:
        rows.append(measure(each, args.candidates, args.told, args.evictions))
        print(*rows[-1], file=sys.stderr, flush=True)  # a table that is cut short has said something
    bar = f"<= {BAR_US:g} us, <= {BAR_MS:g} ms"
    print(render(["policy", "candidates", "us an eviction", "longest ms", bar, "set-up s"], rows))


if __name__ == "__main__":
    main()
