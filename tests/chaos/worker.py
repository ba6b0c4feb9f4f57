"""One process of mixed load; `python -m tests.chaos.worker` is started by load.py.

It does what dice say: puts, gets, leases, sessions, pins, prefetches. KvtierErrors are misses, and counted;
any other exception, a wrong byte, or a block that only another tenant can have put ends the process. SIGTERM
ends it. The last line on stdout is a JSON object of counts.
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

from kvtier.clients import Client, KvtierError, Limits, Namespace, Timeout, Urgency

from .content import (
    CHAIN_BLOCKS,
    IDENTITY,
    NUM_COMMON,
    NUM_WORDS,
    Board,
    Words,
    names_of,
    payload_of,
    wrong_words,
)

NUM_RECENT = 400  # chains that are asked for again
PUT_MASK = (1 << 20) - 1  # of a chain's number: how many its worker put before
SLOW_S = 2.0
NUM_HELD = 32  # leases of a worker that holds them until it is killed
NUM_NEW_SESSIONS = 16
SHORT_TTL_S = 0.2
NUM_TRIES = 100  # gets of what is not there yet
SAID_CALLS = 5  # from one line of counts to the next
REFUSED_S = 0.05  # until the next call
#: Answers that mean a defect, whatever is done to the daemon.
DEFECTS = ("BUG", "BROKEN_ANSWER")


class Wrong(AssertionError):
    """What must never happen."""


class Worker:
    """Load on one client of one tenant."""

    def __init__(self, client: Client, tenant: int, seed: int, board: Board) -> None:
        self.counts: Counter[str] = Counter()
        self._client, self._tenant, self._seed, self._board = client, tenant, seed, board
        self._dice = random.Random(seed)
        self._namespace: Namespace | None = None
        self._into = np.zeros(NUM_WORDS, np.uint64)
        self._next, self._num_sessions = seed << 20, 0
        self._recent: deque[int] = deque([seed << 20], NUM_RECENT)
        self._pause = threading.Event()
        self._steps = (
            *[self._put] * 30,
            *[self._get_recent] * 30,
            *[self._get_what_is_being_put] * 12,
            *[self._get_what_was_put] * 6,
            *[self._get_of_others] * 4,
            *[self._read_lease] * 9,
            *[self._read_overdue_lease] * 1,
            *[self._get_in_sessions] * 10,
            *[self._pin] * 2,
            *[self._prefetch] * 2,
        )

    def step(self) -> None:
        """Do one thing. Raises Wrong."""
        step = self._dice.choice(self._steps)
        self.counts["calls"] += 1
        try:
            if self._namespace is None:
                self._namespace = self._client.register(IDENTITY)
            step(self._namespace)
        except KvtierError as refused:
            self.counts[f"refused: {refused.reason}"] += 1
            if refused.reason in DEFECTS:
                raise Wrong(f"{refused.reason}: {refused}") from refused
            self._pause.wait(REFUSED_S)

    def hold(self) -> None:
        """Put a chain and take leases on it that are never released. Raises KvtierError."""
        namespace, names = self._client.register(IDENTITY), names_of(self._next)
        self._client.put(namespace, names, payload_of(self._tenant, self._next))
        self._held = [self._client.acquire(namespace, names) for _ in range(NUM_HELD)]
        self.counts["held"] = NUM_HELD

    # ----------------------------------------------------------------------------------- steps

    def _put(self, namespace: Namespace) -> None:
        chance = self._dice.random()
        if chance < 0.7:
            number, self._next = self._next, self._next + 1
            self._board.say(self._seed, self._tenant, self._next)
        elif chance < 0.85:
            number = self._dice.randrange(NUM_COMMON)
        else:
            number = self._dice.choice(self._recent)
        session = f"{self._tenant}/{number}" if self._dice.random() < 0.3 else ""
        report = self._client.put(
            namespace, names_of(number), payload_of(self._tenant, number), session=session
        )
        self.counts["blocks acknowledged"] += report.num_stored
        if report.complete:
            self._recent.append(number)
            self._get(namespace, number)

    def _get_recent(self, namespace: Namespace) -> None:
        self._get(namespace, self._dice.choice(self._recent))

    def _get_what_is_being_put(self, namespace: Namespace) -> None:
        """Ask for the chain that another worker says it will put next, until there is something of it."""
        number = self._board.ask(self._tenant, self._dice)
        if number is None:
            return
        for _ in range(NUM_TRIES):
            num_verified = self.counts["blocks verified"]
            self._get(namespace, number)
            if self.counts["blocks verified"] > num_verified:
                self.counts["caught while put"] += 1
                return

    def _get_what_was_put(self, namespace: Namespace) -> None:
        """Ask for a chain that any worker of the tenant put a while ago, maybe on another host."""
        number = self._board.ask(self._tenant, self._dice)
        if number is not None and (age := self._dice.randrange(1, NUM_RECENT // 10)) <= number & PUT_MASK:
            self._get(namespace, number - age)

    def _get_of_others(self, namespace: Namespace) -> None:
        """Ask for what only the other tenant can have put."""
        number = self._board.ask(1 - self._tenant, self._dice)
        if number is not None:
            report = self._client.get(namespace, names_of(number), self._into)
            if report.num_blocks:
                raise Wrong(f"{report.num_blocks} blocks of chain {number}, which only the other tenant put")
            self.counts["asked for what others put"] += 1

    def _get(self, namespace: Namespace, number: int, session: str = "") -> None:
        self._into.fill(0)
        began_at = time.monotonic()
        report = self._client.get(namespace, names_of(number), self._into, session=session)
        self.counts["gets over 2 s"] += time.monotonic() > began_at + SLOW_S
        self._check(self._into, report.num_blocks, number)

    def _get_in_sessions(self, namespace: Namespace) -> None:
        """A few sessions that were never seen before; the last one ends."""
        for _ in range(NUM_NEW_SESSIONS):
            self._num_sessions += 1
            name = f"{self._seed}/{self._num_sessions}"
            session = self._client.session(name, self._dice.choice([Urgency.QUEUED, Urgency.DECODING]))
            self._get(namespace, self._dice.choice(self._recent), name)
            session.update(Urgency.IDLE, back_in_s=self._dice.choice([None, 1.0, 30.0]))
            self.counts["sessions"] += 1
        session.end()

    def _read_lease(self, namespace: Namespace) -> None:
        number = self._dice.choice(self._recent)
        with self._client.acquire(namespace, names_of(number)) as lease:
            words = np.zeros(NUM_WORDS, np.uint64)
            num_seen = np.zeros(CHAIN_BLOCKS, np.int64)
            half = NUM_WORDS // CHAIN_BLOCKS // 2
            for fragment in lease:
                start = fragment.block * 2 * half + fragment.group * half
                words[start : start + half] = fragment.copy().view(np.uint64)
                num_seen[fragment.block] += 1
        missing = np.flatnonzero(num_seen != 2)
        self._check(words, int(missing[0]) if len(missing) else CHAIN_BLOCKS, number)
        self.counts["leases"] += 1

    def _read_overdue_lease(self, namespace: Namespace) -> None:
        """Read in place what a lease gave, long after its time: the memory must not be another block's."""
        number = self._dice.choice(self._recent)
        with self._client.acquire(namespace, names_of(number), ttl_s=SHORT_TTL_S) as lease:
            fragments = list(lease)
            self._pause.wait(self._dice.random() * 4)
            half = NUM_WORDS // CHAIN_BLOCKS // 2
            for fragment in fragments:
                start = fragment.block * 2 * half + fragment.group * half
                expected = payload_of(self._tenant, number)[start : start + half]
                if not np.array_equal(fragment.copy().view(np.uint64), expected):
                    raise Wrong(f"chain {number}, block {fragment.block}: other bytes in an overdue lease")
        self.counts["overdue leases"] += 1

    def _pin(self, namespace: Namespace) -> None:
        pin = self._client.pin(namespace, names_of(self._dice.choice(self._recent)), ttl_s=2.0)
        self.counts["pins"] += 1
        if self._dice.random() < 0.5:
            pin.unpin()

    def _prefetch(self, namespace: Namespace) -> None:
        self._client.prefetch(namespace, names_of(self._dice.choice(self._recent)))

    def _check(self, words: Words, num_blocks: int, number: int) -> None:
        """Compare the first blocks of a chain. Raises Wrong."""
        if not 0 <= num_blocks <= CHAIN_BLOCKS:
            raise Wrong(f"{num_blocks} blocks of a chain of {CHAIN_BLOCKS}")
        if problem := wrong_words(words[: num_blocks * NUM_WORDS // CHAIN_BLOCKS], self._tenant, number):
            raise Wrong(problem)
        self.counts["blocks verified"] += num_blocks
        self.counts["blocks missed"] += (
            CHAIN_BLOCKS - num_blocks
        )  # evicted, lost to a fault, or not there yet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--board", type=Path, required=True)
    parser.add_argument("--tenant", type=int, default=0)
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two calls")
    parser.add_argument("--hold", action="store_true", help="take leases and do nothing until killed")
    arguments = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    wait_s = 60.0 if arguments.hold else 5.0  # one that holds leases says so, however busy the machine is
    timeout = Timeout(call_s=wait_s, connect_s=wait_s)
    limits = Limits(staging_bytes=2 << 20)  # dram is small, and so are its tenants' shares
    with Client(arguments.target, timeout=timeout, shared_memory=not arguments.grpc, limits=limits) as client:
        worker = Worker(client, arguments.tenant, arguments.seed, Board(arguments.board))
        if arguments.hold:
            worker.hold()
            print(json.dumps(worker.counts), flush=True)
            ended.wait()
            return 0
        try:
            while not ended.is_set():
                worker.step()
                if worker.counts["calls"] % SAID_CALLS == 0:
                    print(json.dumps(worker.counts), flush=True)
                ended.wait(arguments.pause)
        finally:
            print(json.dumps(worker.counts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
