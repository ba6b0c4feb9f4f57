"""Can one tenant tell by the clock what another one stored? A classifier tries, on gets and on puts.

    python -m bench.timing --probes 2500

A real daemon with two tenants. The victim stores half of a set of prompts; the attacker asks for all of them,
or puts all of them, in random order, and times every call. The area under the ROC curve of "the slower (or
the quicker) ones are the victim's" is 0.5 when the clock says nothing; the published attack on a shared cache
(CVE-2025-46570) reaches 0.99. It must stay at 0.55 or below. As a control the attacker does the same with
prompts of its own, half of which it stored itself: a classifier that cannot tell even those proves nothing.
"""

import argparse
import hashlib
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvtier.appliance.tokens import hash_of, make_token
from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity, Timeout
from tests.daemon import Daemon

from .machine import describe
from .table import render

GEOMETRY = Geometry(num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
MODEL = hashlib.sha256(b"timing").digest()
WINDOW = 41  # calls among which one is judged
LIMIT = 0.55
CONTROL = 0.9
TENANTS = ("attacker", "victim")
PAYLOAD = np.arange(GEOMETRY.block_bytes, dtype=np.uint8)


def name_of(kind: str, number: int) -> bytes:
    """Return the name of a prompt of one block."""
    return hashlib.sha256(f"{kind}/{number}".encode()).digest()


def without_drift(times_ns: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Any:
    """Return times in the order they were taken, each divided by the median of those around it: what else the
    machine did meanwhile must not hide what the call itself says."""
    padded = np.pad(times_ns, WINDOW // 2, mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    return times_ns / np.median(around, axis=1)


def area(slow: "np.ndarray[tuple[int], np.dtype[np.float64]]", is_positive: list[bool]) -> float:
    """Return the area under the ROC curve of a score, 0.5 to 1: whichever direction tells more."""
    ranks = np.argsort(np.argsort(slow)) + 1.0
    positive = np.array(is_positive)
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    rank_sum = float(ranks[positive].sum())
    found = (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
    return max(found, 1 - found)


@contextmanager
def tenant(target: str, token: Path, shared_memory: bool) -> Iterator[tuple[Client, Namespace]]:
    """Connect as whose token this is, or, over shared memory, as this process's user."""
    os.environ["KVTIER_TOKEN_FILE"] = str(token)
    patient = Timeout(call_s=60.0)  # a busy machine must not end the measurement
    with Client(target, shared_memory=shared_memory, timeout=patient) as client:
        namespace = client.register(NamespaceIdentity(MODEL, GEOMETRY))
        yield client, namespace


def probe(
    attacker: tuple[Client, Namespace],
    owner: tuple[Client, Namespace],
    kind: str,
    num_probes: int,
    rng: random.Random,
) -> float:
    """Let `owner` store half of the prompts, the attacker try all; return how well the clock tells."""
    stored = [number < num_probes // 2 for number in range(num_probes)]
    for number in range(num_probes // 2):
        report = owner[0].put(owner[1], [name_of(kind, number)], PAYLOAD)
        assert report.num_stored == 1, f"{kind}: {report}"
    order = list(range(num_probes))
    rng.shuffle(order)
    client, namespace = attacker
    into = np.empty(GEOMETRY.block_bytes, np.uint8)
    times_ns = np.empty(num_probes)
    for turn, number in enumerate(order):
        names = [name_of(kind, number)]
        began_at = time.perf_counter_ns()
        if kind.startswith("get"):
            client.get(namespace, names, into=into)
        else:
            client.put(namespace, names, PAYLOAD)
        times_ns[turn] = time.perf_counter_ns() - began_at
    return area(without_drift(times_ns), [stored[number] for number in order])


def measure(folder: Path, num_probes: int, seed: int) -> list[tuple[str, str, float, float]]:
    """Return (way, call, area for the other's prompts, area for one's own) of every combination."""
    tokens = {name: make_token() for name in TENANTS}
    for name, token in tokens.items():
        (folder / name).write_text(token)
    (folder / "tokens").write_text("".join(f"{name} {hash_of(token)}\n" for name, token in tokens.items()))
    policy = {
        "access": {"tokens": str(folder / "tokens")},
        "tenants": {
            "attacker": {"tokens": ["attacker"], "uids": [os.getuid()]},
            "victim": {"tokens": ["victim"]},
        },
        "tiers": {"dram": {"capacity": "1GiB", "extent": "64MiB"}},
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    daemon = Daemon(folder, folder / "policy.yaml")
    daemon.start()
    rng = random.Random(seed)
    found = []
    try:
        for way, shared_memory in (("shared memory", True), ("gRPC", False)):
            with (
                tenant(daemon.target, folder / "victim", False) as victim,
                tenant(daemon.target, folder / "attacker", shared_memory) as attacker,
            ):
                for call in ("get", "put"):
                    other = probe(attacker, victim, f"{call} of the other's, {way}", num_probes, rng)
                    own = probe(attacker, attacker, f"{call} of one's own, {way}", num_probes, rng)
                    found.append((way, call, other, own))
    finally:
        daemon.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--probes", type=int, default=2500, help="of each kind; half of them are stored")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.probes, arguments.seed)
    labels = describe({}) | {"command": shlex.join(["python", "-m", "bench.timing", *sys.argv[1:]])}
    for label, value in labels.items():
        print(f"{label:>9}: {value}")
    print(f"\nArea under the ROC curve; at most {LIMIT} for the other's, at least {CONTROL} for one's own.\n")
    rows = [(f"{call}, {way}", f"{other:.3f}", f"{own:.3f}") for way, call, other, own in found]
    print(render(("", "the other's", "one's own"), rows))
    if any(other > LIMIT or own < CONTROL for _, _, other, own in found):
        sys.exit("the clock tells, or the control does not")


if __name__ == "__main__":
    main()
