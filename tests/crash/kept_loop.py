"""`python -m tests.crash.kept_loop --iterations 100`: kill -9 of the daemon under load; memory stays.

A client puts chains as fast as it can; at a random moment the daemon is killed, and its supervisor
starts the next one. Every block whose put was acknowledged is then asked for: found with the bytes that were
put, or not there. Other bytes end the loop. A third of the kills come at a random moment of the next daemon's
start or of what it takes over.
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier.clients import Client, KvtierError
from tests.crash.daemon_loop import CHAIN_BLOCKS, IDENTITY, Writer, read
from tests.daemon import PATIENT, START_S, Daemon, is_alive

from ..waiting import until

SETTINGS = ("tiers.dram.capacity=128MiB", "tiers.dram.extent=4MiB", "observe.http=off")
MAX_CHAINS = 192  # of 512 KiB: three quarters of memory, so that nothing is evicted
MAX_LIFE_CHAINS = 8  # put in one life of the daemon, so that one supervisor sees many of them
MAX_LIFE_S = 0.05
MAX_EARLY_S = 1.5  # after a kill comes the next one, while the daemon starts or has just begun to serve
MAX_KILLS = 40  # of one supervisor's daemons
PATIENCE_S = 15.0  # without another block, the rest counts as lost


@dataclass
class Tally:
    """What became of the blocks that were acknowledged."""

    num_kills: int = 0
    num_answers: int = 0  # of daemons that were waited for after a kill
    num_put: int = 0
    num_found: int = 0
    down_s: float = 0.0  # until the next daemon answered, all of them together
    back_s: float = 0.0  # until everything was found

    def __str__(self) -> str:
        share, num_answers = self.num_found / max(1, self.num_put), max(1, self.num_answers)
        return (
            f"{self.num_kills} kills, {self.num_put} blocks asked for, {self.num_found} found ({share:.3%}); "
            f"mean time to an answer {self.down_s / num_answers:.2f} s, "
            f"to all blocks {self.back_s / num_answers:.2f} s"
        )


class Loop:
    """One supervisor; its daemons are killed one after the other."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        self._dice = random.Random(seed)
        self._tally = tally
        self._chains: list[int] = []  # acknowledged
        self._killed, self._killed_at = 0, time.monotonic()  # the last one
        self._daemon = Daemon(folder, settings=SETTINGS)

    def run(self, num_kills: int) -> None:
        """Kill `num_kills` daemons, or fewer if memory is full before."""
        self._daemon.start()
        try:
            for _ in range(num_kills):
                if len(self._chains) >= MAX_CHAINS:
                    return
                self._work_and_kill()
                if self._dice.random() < 0.5:
                    self._kill_early()
                self._wait_for_answer()
                self._count()
        finally:
            self._daemon.close()

    def _work_and_kill(self) -> None:
        first = len(self._chains)
        numbers = range(first, min(MAX_CHAINS, first + MAX_LIFE_CHAINS))
        writer = Writer(self._daemon.target, self._chains, numbers)
        writer.wait_for(1)
        threading.Event().wait(MAX_LIFE_S * self._dice.random())
        self._kill()
        writer.end()

    def _kill(self) -> None:
        """Kill the process that serves or is about to."""
        until(lambda: self._daemon.pid not in (0, self._killed))  # the one before is still ending
        process = self._daemon.pid
        os.kill(process, signal.SIGKILL)
        self._tally.num_kills += 1
        self._killed, self._killed_at = process, time.monotonic()

    def _kill_early(self) -> None:
        """Kill the next daemon at a random moment. Only one: two in a row that never served end memory."""
        until(lambda: not is_alive(self._killed) and self._daemon.pid not in (0, self._killed))
        threading.Event().wait(MAX_EARLY_S * self._dice.random())
        self._kill()

    def _wait_for_answer(self) -> None:
        """Wait until the next daemon answers."""
        while True:
            assert time.monotonic() < self._killed_at + START_S, self._daemon.log.read_text()
            try:
                with Client(self._daemon.target) as client:
                    client.register(IDENTITY)
                break
            except KvtierError:
                threading.Event().wait(0.01)
        self._tally.num_answers += 1
        self._tally.down_s += time.monotonic() - self._killed_at

    def _count(self) -> None:
        """Ask for every acknowledged block until all are found, or no more come."""
        began_at = heard_at = time.monotonic()
        num_wanted, num_found = len(self._chains) * CHAIN_BLOCKS, 0
        with Client(self._daemon.target, timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            while num_found < num_wanted and time.monotonic() < heard_at + PATIENCE_S:
                before = num_found
                num_found = sum(read(client, namespace, number) for number in self._chains)
                if num_found > before:
                    heard_at = time.monotonic()
        self._tally.back_s += time.monotonic() - began_at
        self._tally.num_put += num_wanted
        self._tally.num_found += num_found


def main() -> int:
    """Run loops, each with a supervisor of its own, until there were enough kills."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.kept_loop", description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tally, seed = Tally(), arguments.seed
    while tally.num_kills < arguments.iterations:
        with tempfile.TemporaryDirectory(prefix="kvtier-kept-") as folder:
            Loop(Path(folder), seed, tally).run(min(MAX_KILLS, arguments.iterations - tally.num_kills))
        print(f"seed {seed}: {tally}", flush=True)
        seed += 1
    return 0 if tally.num_found == tally.num_put else 1


if __name__ == "__main__":
    raise SystemExit(main())
