"""`python -m tests.crash.mode_loop --iterations 10`: what a kill -9 takes, by `tiers.nvme.write`.

For each mode, twice: *rest*, a load that fits into memory, then seconds without any, then the kill; *load*,
the kill comes in the middle of it. The daemon starts again on the same directory, and every block whose put
was acknowledged is asked for: found with the bytes that were put, or not there. Other bytes end the loop.
"""

import argparse
import itertools
import random
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from kvtier.clients import Client
from tests.crash.daemon_loop import CHAIN_BLOCKS, IDENTITY, Writer, names_of, payload_of, read
from tests.daemon import PATIENT, Daemon

from ..waiting import until

MODES = ("spill", "idle", "through")
REST_CHAINS = 64  # 32 MiB, half of memory
MIN_CHAINS = 4  # of a load, put before the life that ends at random begins
PAUSE_S = 0.01  # between two puts of a load: 50 MB/s
SETTINGS = (
    *("tiers.dram.capacity=64MiB", "tiers.dram.extent=4MiB"),
    *("tiers.nvme.capacity=256MiB", "tiers.nvme.segment=4MiB", "observe.http=off"),
)


@dataclass
class Tally:
    """What became of the blocks that were acknowledged in one mode."""

    num_kills: int = 0
    num_put: int = 0
    num_found: int = 0

    def __str__(self) -> str:
        share = self.num_found / self.num_put if self.num_put else 0.0
        return f"{self.num_kills} kills, {self.num_put} blocks put, {self.num_found} found ({share:.1%})"


class Life:
    """One daemon in a folder of its own, killed once."""

    def __init__(self, folder: Path, mode: str, tally: Tally) -> None:
        self._tally = tally
        self._chains: list[int] = []  # acknowledged
        settings = (*SETTINGS, f"tiers.nvme.path={folder / 'nvme'}", f"tiers.nvme.write={mode}")
        self._daemon = Daemon(folder, settings=settings)

    def rest_and_die(self, rest_s: float | None) -> None:
        """Put what fits into memory, wait so long (None: until nothing is only in memory), and be killed."""
        self._daemon.start()
        try:
            with Client(self._daemon.target, timeout=PATIENT) as client:
                namespace = client.register(IDENTITY)
                for number in range(REST_CHAINS):
                    client.put(namespace, names_of(number), payload_of(number))
                    self._chains.append(number)
            if rest_s is None:
                self._until_clean()
            else:
                threading.Event().wait(rest_s)
            self._daemon.stop(signal.SIGKILL)
            self._count()
        finally:
            self._daemon.close()

    def work_and_die(self, dice: random.Random, max_life_s: float) -> None:
        """Be killed while a client puts one chain after another."""
        self._daemon.start()
        try:
            writer = Writer(self._daemon.target, self._chains, itertools.count(), PAUSE_S)
            writer.wait_for(MIN_CHAINS)
            threading.Event().wait(max_life_s * (0.3 + 0.7 * dice.random()))
            self._daemon.stop(signal.SIGKILL)
            writer.end()
            self._count()
        finally:
            self._daemon.close()

    def _until_clean(self) -> None:
        until(lambda: not self._daemon.status().writes.num_blocks_only_in_memory, "blocks are only in memory")

    def _count(self) -> None:
        """Start again and look. Raises WrongBytes."""
        self._daemon.start()
        with Client(self._daemon.target, timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            self._tally.num_kills += 1
            self._tally.num_put += len(self._chains) * CHAIN_BLOCKS
            self._tally.num_found += sum(read(client, namespace, number) for number in self._chains)
        assert self._daemon.stop() == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.mode_loop", description=__doc__)
    parser.add_argument("--iterations", type=int, default=10, help="kills per mode and load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds without load before the kill")
    parser.add_argument("--max-life", type=float, default=1.0, help="seconds of load before the kill")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.iterations} kills each; wrong bytes would end this")
    for mode in args.modes:
        rest, load = Tally(), Tally()
        for iteration in range(args.iterations):
            dice = random.Random(f"{args.seed}/{mode}/{iteration}")
            with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as name:
                Life(Path(name), mode, rest).rest_and_die(args.rest)
            with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as name:
                Life(Path(name), mode, load).work_and_die(dice, args.max_life)
        print(f"{mode:8} after {args.rest:g} s of rest: {rest}", flush=True)
        print(f"{mode:8} under load: {load}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
