"""Can one tenant tell by the clock what another one stored? A classifier tries, on gets and on puts.

    python -m bench.timing --prompts 450

A real daemon with two tenants. The victim stores half of a set of prompts; the attacker asks for all of them,
or puts all of them, and times every call. The area under the ROC curve of "the slower (or the quicker) ones
are the victim's" is 0.5 when the clock says nothing; the published attack on a shared cache (CVE-2025-46570)
reaches 0.99. It must stay at 0.55 or below. As a control the attacker does the same with prompts of its own,
half of which it stored itself. And because a put over gRPC streams its bytes whether or not they are
stored, so that even one's own make next to no difference, a second control: the smallest delay that, added to
every call about the victim's prompts, this classifier would have told with an area of 0.95.

The attacker makes the most of it. A prompt has several parts of many small blocks, and it tries each part
by a call of its own, in an order in which the calls of all prompts are mixed, so that a burst of other work
falls on both kinds alike. Every time is divided by the median of those around it, and what judges a prompt is
the median over its calls. With 450 prompts chance alone makes 0.027 (one standard deviation).
"""

import argparse
import hashlib
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from kvtier.appliance.tokens import hash_of, make_token
from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity, Timeout
from tests.daemon import Daemon

from .machine import describe
from .table import render

GEOMETRY = Geometry(num_layers=1, num_kv_heads=1, head_dim=32, block_tokens=16, dtype="bfloat16")
MODEL = hashlib.sha256(b"timing").digest()
NUM_PARTS, PART_BLOCKS = 4, 32  # of a prompt; a part is asked for in one call
WINDOW = 81  # calls among which one is judged
LIMIT = 0.55
CONTROL = 0.95
TENANTS = ("attacker", "victim")
WAYS = ("shared memory", "gRPC")
PAYLOAD = np.arange(PART_BLOCKS * GEOMETRY.block_bytes, dtype=np.uint8)
INTO = np.empty_like(PAYLOAD)


def names_of(kind: str, prompt: int, part: int) -> list[bytes]:
    """Return the names of the blocks of one part of a prompt."""
    return [
        hashlib.sha256(f"{kind}/{prompt}/{part}/{block}".encode()).digest() for block in range(PART_BLOCKS)
    ]


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


class Found(NamedTuple):
    """What one probe found: the area, the smallest delay that would have shown, the median call."""

    area: float
    seen_us: float
    call_us: float


def probe(
    attacker: tuple[Client, Namespace],
    owner: tuple[Client, Namespace],
    kind: str,
    num_prompts: int,
    rng: random.Random,
) -> Found:
    """Let `owner` store half of the prompts, the attacker try all; return what the clock tells."""
    is_stored = [number < num_prompts // 2 for number in range(num_prompts)]
    parts = [(prompt, part) for prompt in range(num_prompts) for part in range(NUM_PARTS)]
    for prompt, part in parts:
        if is_stored[prompt]:
            report = owner[0].put(owner[1], names_of(kind, prompt, part), PAYLOAD)
            assert report.num_stored == PART_BLOCKS, f"{kind}: {report}"
    rng.shuffle(parts)
    times = np.array([timed(attacker, kind[:3], names_of(kind, *one)) for one in parts])
    is_theirs = np.array([is_stored[prompt] for prompt, _ in parts])
    order = np.argsort([prompt for prompt, _ in parts], kind="stable")

    def told(delay_ns: float) -> float:
        scores = without_drift(times + delay_ns * is_theirs)[order].reshape(num_prompts, NUM_PARTS)
        return area(np.median(scores, axis=1), is_stored)

    delays = np.geomspace(1e3, 1e9, 121)
    seen_ns = next((float(delay) for delay in delays if told(delay) >= CONTROL), float("inf"))
    return Found(told(0.0), seen_ns / 1e3, float(np.median(times)) / 1e3)


def timed(attacker: tuple[Client, Namespace], call: str, names: list[bytes]) -> float:
    """Return the nanoseconds that one call about one part takes."""
    client, namespace = attacker
    began_at = time.perf_counter_ns()
    if call == "get":
        client.get(namespace, names, into=INTO)
    else:
        client.put(namespace, names, PAYLOAD)
    return float(time.perf_counter_ns() - began_at)


def measure(
    folder: Path, num_prompts: int, seed: int, ways: Sequence[str]
) -> list[tuple[str, str, Found, Found]]:
    """Return (way, call, what was found of the other's prompts, and of one's own) of every combination."""
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
        # Room for all: 450 prompts x 128 slots of 16 KiB, three and a half times. Nothing is evicted.
        "tiers": {"dram": {"capacity": "3.5GiB", "extent": "64MiB"}},
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    rng = random.Random(seed)
    found = []
    for way in ways:
        daemon = Daemon(folder, folder / "policy.yaml")
        daemon.start()
        try:
            with (
                tenant(daemon.target, folder / "victim", False) as victim,
                tenant(daemon.target, folder / "attacker", way != "gRPC") as attacker,
            ):
                for call in ("get", "put"):
                    other = probe(attacker, victim, f"{call} of the other's, {way}", num_prompts, rng)
                    own = probe(attacker, attacker, f"{call} of one's own, {way}", num_prompts, rng)
                    found.append((way, call, other, own))
                    print(f"{call}, {way}: {other} {own}", file=sys.stderr, flush=True)
        finally:
            daemon.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=450, help="of each kind; half of them are stored")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one; both unless given")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.prompts, arguments.seed, arguments.way or WAYS)
    labels = describe({}) | {"command": shlex.join(["python", "-m", "bench.timing", *sys.argv[1:]])}
    for label, value in labels.items():
        print(f"{label:>9}: {value}")
    print(f"\nArea under the ROC curve; at most {LIMIT} for the other's. Seen: an area of {CONTROL}.\n")
    rows = [
        (
            f"{call}, {way}",
            f"{other.area:.3f}",
            f"{own.area:.3f}",
            f"{other.seen_us:.0f} us",
            f"{other.call_us:.0f} us",
        )
        for way, call, other, own in found
    ]
    print(render(("", "the other's", "one's own", "would be seen", "a call"), rows))
    if any(other.area > LIMIT for _, _, other, _ in found):
        sys.exit("the clock tells")
    if any(own.area < CONTROL and other.seen_us > other.call_us / 2 for _, _, other, own in found):
        sys.exit("the clock would not have told")


if __name__ == "__main__":
    main()
