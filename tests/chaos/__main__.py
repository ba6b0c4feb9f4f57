"""`python -m tests.chaos --seconds 180`: mixed load from several processes, and faults.

Two tenants, one over shared memory and gRPC, the other over gRPC (worker.py), use one daemon with small
tiers. Faults follow one another in an order that `--seed` decides (faults.py), or only those of `--only`.
It fails when

- a worker read a wrong byte, found what only the other tenant put, read other bytes in place in a lease, was
  told of a defect (BUG, BROKEN_ANSWER), or raised anything but KvtierError;
- more than half of the chains that were acknowledged right before a kill of the daemon are lost, although
  memory outlives it;
- no daemon serves after a kill, SIGTERM ends it with an error, or its log has a traceback;
- at the end, with all clients gone, a lease or a client is left, an audit finds something, or the daemon does
  not store and return a chain over each way.

`--break NAME` runs it against a copy of the product with a planted defect (breaks.py) and succeeds when
that is seen.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import yaml

from kvtier.appliance.security.tokens import hash_of, make_token
from kvtier.clients import Client, KvtierError
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import PATIENT, Daemon

from .breaks import BREAKS, planted
from .content import CHAIN_BLOCKS, IDENTITY, names_of, payload_of, wrong_words
from .faults import WITNESSES, Faults
from .load import Load, Role

TENANTS = ("acme", "bravo")
WAYS = ((0, False), (0, True), (1, True))  # tenant, and whether over gRPC: a user is of one tenant
QUIET_S = 60.0  # for clients to be gone, and the disk to be used again
LOG_CHARACTERS = 4000  # of the daemon's, shown after a failure
MIN_WITNESSES = 2  # fewer say nothing
WITNESSED = 0.5  # of them; a put under way makes room now and then


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone can read."""
    path.touch(0o600)
    path.write_text(text)


def prepare(folder: Path, write: str) -> Path:
    """Write tokens and a policy with two tenants and small tiers; return its path. `write`: of nvme."""
    tokens = {name: make_token() for name in TENANTS}
    for name, token in tokens.items():
        write_private(folder / name, token)
    write_private(folder / "tokens", "".join(f"{name} {hash_of(token)}\n" for name, token in tokens.items()))
    policy = {
        "access": {"tokens": str(folder / "tokens")},
        "observe": {"http": "off"},
        "tenants": {
            "acme": {"members": ["token:acme", f"uid:{os.getuid()}"]},  # the local channel takes no tokens
            "bravo": {"members": ["token:bravo"]},
        },
        "tiers": {
            "dram": {"capacity": "64MiB", "extent": "4MiB"},
            "nvme": {"capacity": "192MiB", "segment": "4MiB", "path": str(folder / "nvme"), "write": write},
        },
    }
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(policy))
    return path


class Chaos:
    """One run. `problems` is empty when nothing was wrong."""

    def __init__(self, folder: Path, seed: int, pause_s: float) -> None:
        dice = random.Random(f"{seed}/write")
        write = dice.choice(["spill", "idle", "through"])
        print(f"tiers.nvme.write: {write}", flush=True)
        policy = prepare(folder, write)
        self.daemon = Daemon(folder, policy)
        self.load = Load(folder, self.daemon.target, pause_s=pause_s)
        self.faults = Faults(self.daemon, self.load, policy, folder / "nvme", folder / TENANTS[0], seed)
        self._folder, self._dice = folder, random.Random(f"{seed}/order")

    def run(self, seconds: float, only: list[str]) -> dict[str, int]:
        """Return counts of what was done. Raises AssertionError when something was wrong."""
        pause, began_at = threading.Event(), time.monotonic()
        self.daemon.start()
        try:
            for tenant, is_grpc in WAYS:
                for _ in range(1 if is_grpc else 2):
                    self.load.start(Role(tenant, is_grpc, self._folder / TENANTS[tenant]))
            self.load.wait_until_read()
            kinds: list[str] = []
            rounds = [kind for kind in self.faults.round if not only or kind in only]
            num_faults = 0
            while time.monotonic() < began_at + seconds or not num_faults:
                num_faults += 1
                kinds = kinds or self._dice.sample(rounds, len(rounds))
                kind = kinds.pop()
                said = self.faults.kinds[kind]()
                print(f"{time.monotonic() - began_at:6.1f} s  {kind}{said and ': '}{said}", flush=True)
                pause.wait(0.2 + 2 * self._dice.random())
                self.load.assert_alive()
            self.faults.restore()
            self.load.end_all()
            self._assert_quiet()
            self._assert_served()
            assert self.daemon.stop() == 0, "SIGTERM ended the daemon with an error"
            self._assert_witnessed()
            assert "Traceback" not in (log := self.daemon.log.read_text()), log[
                log.find("Traceback") - 300 :
            ][:3000]
        finally:
            self.load.kill_all()
            self.daemon.close()
        return dict(self.load.counts())

    def _assert_quiet(self) -> None:
        """Nothing is left of clients that are gone, and the books are right."""
        pause, deadline_at = threading.Event(), time.monotonic() + QUIET_S
        with grpc.insecure_channel(self.daemon.target) as channel:
            stub = AdminServiceStub(channel)
            while (status := stub.GetStatus(admin_pb2.GetStatusRequest())).num_leases or status.num_clients:
                assert time.monotonic() < deadline_at, (
                    f"left by dead clients: {status.num_leases} leases, {status.num_clients} clients"
                )
                pause.wait(0.1)
            problems = list(stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems)
        assert problems == [], problems

    def _assert_served(self) -> None:
        """A chain that was never seen is stored and returned, for each tenant and over each way."""
        for number, (tenant, is_grpc) in enumerate(WAYS, 2 * WITNESSES):
            os.environ["KVTIER_TOKEN_FILE"] = str(self._folder / TENANTS[tenant])
            with Client(self.daemon.target, shared_memory=not is_grpc, timeout=PATIENT) as client:
                namespace, names = client.register(IDENTITY), names_of(number)
                stored = client.put(namespace, names, payload_of(tenant, number))
                report = client.get(namespace, names)
            assert stored.complete, f"a put after the faults: {stored}"
            assert report.num_blocks == CHAIN_BLOCKS, f"{report.num_blocks} blocks of what was just put"
            assert not (problem := wrong_words(report.data.view("u8"), tenant, number)), problem

    def _assert_witnessed(self) -> None:
        num_asked, num_found = self.faults.num_witnesses, self.faults.num_witnesses_found
        print(f"{num_found} of {num_asked} witnesses found after a kill of the daemon")
        assert num_asked < MIN_WITNESSES or num_found >= num_asked * WITNESSED, (
            "memory does not outlive the daemon"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--pause", type=float, default=0.003, help="seconds between two calls of a worker")
    parser.add_argument(
        "--break", dest="planted", choices=[b.name for b in BREAKS], help="plant this defect first"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="this one; may be repeated"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-chaos-") as name, planted(arguments.planted, Path(name)):
        try:
            counts = Chaos(Path(name), arguments.seed, arguments.pause).run(arguments.seconds, arguments.only)
        except (AssertionError, KvtierError) as problem:
            log = (Path(name) / "daemon.log").read_text()[-LOG_CHARACTERS:]
            print(f"{log}\nseed {arguments.seed}: {problem}", file=sys.stderr)
            return 0 if arguments.planted else 1
    print(json.dumps(counts))
    if arguments.planted:
        print(f"the planted defect {arguments.planted} was not seen", file=sys.stderr)
    return 1 if arguments.planted else 0


if __name__ == "__main__":
    sys.exit(main())
