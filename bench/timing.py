"""Measures whether response times tell a tenant what another one stored: a classifier of gets and puts.

    python -m bench.timing --prompts 450 [--rounds 5]

A real daemon with two tenants. The victim stores half of a set of prompts; the attacker asks for all of them,
or puts all of them, and times every call. The area under the ROC curve of "the slower ones are the victim's"
is 0.5 when the clock says nothing, below when the victim's are quicker; the published attack on a shared
cache (CVE-2025-46570) reaches 0.99. It must stay within 0.05 of 0.5. Two columns say what that is worth:

    none's      nothing is stored, and a half of the prompts is called the victim's all the same: what the
                bench finds where there is no difference
    one's own   the attacker stored that half itself: what it makes of something, 0.45 away from 0.5 at least

The attacker makes the most of it. A prompt has several parts of many small blocks, and it tries each part
by a call of its own, in an order in which the calls of all prompts are mixed, so that a burst of other work
falls on both kinds alike. Every time is divided by the median of those around it, and what judges a prompt is
the median over its calls. Over gRPC a put has to send its bytes whether or not they are stored, which takes
far longer than storing them, and hides it. So there the attacker speaks gRPC itself, sends all but the last
byte, waits until that must have arrived, and times the last byte and the answer.

With 450 prompts chance alone makes 0.027 (one standard deviation); several rounds make it less.
"""

import argparse
import hashlib
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from kvtier.appliance.security.tokens import hash_of, make_token
from kvtier.clients import Client, Geometry, NamespaceIdentity, Timeout
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.channels import open_channel
from kvtier.v1.conversions import identity_to_wire
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from tests.daemon import Daemon

from .machine import print_machine
from .table import render

GEOMETRY = Geometry(num_layers=1, num_kv_heads=1, head_dim=32, block_tokens=16, dtype="bfloat16")
IDENTITY = NamespaceIdentity(hashlib.sha256(b"timing").digest(), GEOMETRY)
NUM_PARTS = 4  # of a prompt; a part is asked for in one call
PART_BLOCKS = {"shared memory": 32, "gRPC": 256}  # more where a call costs more
WINDOW = 81  # calls among which one is judged
LIMIT = 0.05  # away from 0.5
CONTROL = 0.95
SETTLE_S = 0.015  # until all but the last byte of a put has arrived
NUM_WARM = 100  # calls before the first that counts
TENANTS = ("attacker", "victim")
WAYS = ("shared memory", "gRPC")
KINDS = ("none's", "the other's", "one's own")

Areas = dict[str, list[float]]  # of each kind, one a round
Call = Callable[[list[bytes]], "TimedAnswer"]  # of the names of a part


class TimedAnswer(NamedTuple):
    """What a call took, and how many of its blocks the attacker had stored before."""

    time_ns: float
    num_found: int


def names_of(kind: str, prompt: int, part: int, num_blocks: int) -> list[bytes]:
    """Return the names of the blocks of one part of a prompt."""
    return [
        hashlib.sha256(f"{kind}/{prompt}/{part}/{block}".encode()).digest() for block in range(num_blocks)
    ]


def payload_of(num_blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return bytes for some blocks."""
    return np.arange(num_blocks * GEOMETRY.block_bytes, dtype=np.uint8)


def without_drift(times_ns: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Any:
    """Return times in the order they were taken, each divided by the median of those around it: what else the
    machine did meanwhile must not hide what the call itself says."""
    padded = np.pad(times_ns, WINDOW // 2, mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    return times_ns / np.median(around, axis=1)


def area(slow: "np.ndarray[tuple[int], np.dtype[np.float64]]", is_positive: list[bool]) -> float:
    """Return the area under the ROC curve of a score: how often a positive one is above a negative one."""
    ranks = np.argsort(np.argsort(slow)) + 1.0
    positive = np.array(is_positive)
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    rank_sum = float(ranks[positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def chance(num_prompts: int, num_rounds: int) -> float:
    """Return the standard deviation of the mean area of prompts between which there is no difference (Mann
    and Whitney, Annals of Mathematical Statistics 18, 1947)."""
    half = num_prompts / 2
    return math.sqrt((num_prompts + 1) / (12 * half * half) / num_rounds)


# ------------------------------------------------------------------------------------------ callers


@contextmanager
def client_of(target: str, token: Path, shared_memory: bool) -> Iterator[Client]:
    """Yield a connected client: of the token's tenant, or, over shared memory, of this process's user."""
    os.environ["KVTIER_TOKEN_FILE"] = str(token)
    patient = Timeout(call_s=60.0, connect_s=60.0)  # a busy machine must not end the measurement
    with Client(target, shared_memory=shared_memory, timeout=patient) as client:
        client.register(IDENTITY)  # reads the token
        yield client


def store(client: Client, names: list[bytes]) -> None:
    """Store blocks, all of them new."""
    report = client.put(client.register(IDENTITY), names, payload_of(len(names)))
    assert report.num_stored == len(names), str(report)


@contextmanager
def calls_of(target: str, token: Path, way: str, call: str) -> Iterator[Call]:
    """Yield the attacker's call."""
    with client_of(target, token, way != "gRPC") as client:
        namespace = client.register(IDENTITY)
        payload = payload_of(PART_BLOCKS[way])
        into = np.empty_like(payload)

        def get(names: list[bytes]) -> TimedAnswer:
            began_at = time.perf_counter_ns()
            report = client.get(namespace, names, into=into)
            return TimedAnswer(time.perf_counter_ns() - began_at, report.num_blocks)

        def put(names: list[bytes]) -> TimedAnswer:
            began_at = time.perf_counter_ns()
            report = client.put(namespace, names, payload)
            return TimedAnswer(time.perf_counter_ns() - began_at, len(names) - report.num_stored)

        if call == "get" or way != "gRPC":
            yield get if call == "get" else put
        else:
            with open_channel(target) as channel:
                yield late_put(KVCacheServiceStub(channel), payload.tobytes())


def late_put(stub: Any, payload: bytes) -> Call:
    """Return a put over gRPC that is timed from its last byte to the answer."""
    client_id = stub.OpenClient(
        pb.OpenClientRequest(request_id="late", name="late", ttl_ms=3_600_000)
    ).client_id
    namespace_id = stub.RegisterNamespace(
        pb.RegisterNamespaceRequest(identity=identity_to_wire(IDENTITY))
    ).namespace_id

    def put(names: list[bytes]) -> TimedAnswer:
        header = pb.ReserveRequest(
            request_id=names[0].hex(),
            client_id=client_id,
            namespace_id=namespace_id,
            prefix_hashes=b"".join(names),
            deadline_ms=60_000,
        )
        began_at = 0

        def messages() -> Iterator[pb.PutRequest]:
            nonlocal began_at
            yield pb.PutRequest(header=header)
            yield pb.PutRequest(chunk=payload[:-1])
            time.sleep(SETTLE_S)
            began_at = time.perf_counter_ns()
            yield pb.PutRequest(chunk=payload[-1:])

        outcomes = stub.Put(messages()).outcomes
        time_ns = time.perf_counter_ns() - began_at
        assert set(outcomes) <= {pb.PUT_OUTCOME_STORED, pb.PUT_OUTCOME_DEDUPLICATED}, [*outcomes]
        return TimedAnswer(time_ns, outcomes.count(pb.PUT_OUTCOME_DEDUPLICATED))

    return put


# ------------------------------------------------------------------------------------------ classifier


def probe(
    attack: Call,
    stored_by: Client | None,
    kind: str,
    num_blocks: int,
    num_prompts: int,
    rng: random.Random,
) -> float:
    """Let `stored_by` store half of the prompts, and the attacker try all; return the area."""
    is_stored = [number < num_prompts // 2 for number in range(num_prompts)]
    parts = [(prompt, part) for prompt in range(num_prompts) for part in range(NUM_PARTS)]
    for number in range(NUM_WARM):
        attack(names_of("warm", number, 0, num_blocks))
    if stored_by is not None:
        for prompt in range(num_prompts // 2):
            names = (names_of(kind, prompt, part, num_blocks) for part in range(NUM_PARTS))
            store(stored_by, [name for some in names for name in some])
    rng.shuffle(parts)
    answers = [attack(names_of(kind, *one, num_blocks)) for one in parts]
    for (prompt, _), answer in zip(parts, answers, strict=True):  # it is as it is called
        is_own = kind == "one's own" and is_stored[prompt]
        assert answer.num_found == (num_blocks if is_own else 0), f"{kind}: {answer}"
    times = np.array([answer.time_ns for answer in answers])
    order = np.argsort([prompt for prompt, _ in parts], kind="stable")
    scores = without_drift(times)[order].reshape(num_prompts, NUM_PARTS)
    return area(np.median(scores, axis=1), is_stored)


def measure(folder: Path, num_prompts: int, rng: random.Random, way: str, call: str, kind: str) -> float:
    """Return what one probe of a fresh daemon tells."""
    with (
        Daemon(folder, folder / "policy.yaml") as daemon,
        client_of(daemon.target, folder / "victim", False) as victim,
        client_of(daemon.target, folder / "attacker", way != "gRPC") as own,
        calls_of(daemon.target, folder / "attacker", way, call) as attack,
    ):
        owner = {"none's": None, "the other's": victim, "one's own": own}[kind]
        return probe(attack, owner, kind, PART_BLOCKS[way], num_prompts, rng)


def prepare(folder: Path) -> None:
    """Write the policy, and the tenants' tokens."""
    tokens = {name: make_token() for name in TENANTS}
    for name, token in tokens.items():
        (folder / name).write_text(token)
    (folder / "tokens").write_text("".join(f"{name} {hash_of(token)}\n" for name, token in tokens.items()))
    policy = {
        "access": {"tokens": str(folder / "tokens")},
        "observe": {"http": "off"},
        "tenants": {
            "attacker": {"members": ["token:attacker", f"uid:{os.getuid()}"]},
            "victim": {"members": ["token:victim"]},
        },
        # Room for 900 prompts of 128 slots of 16 KiB, or 150 of 1024, one and a half times: no eviction.
        "tiers": {"dram": {"capacity": "4GiB", "extent": "64MiB"}},
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))


class TimingRow(NamedTuple):
    """What was found of one call along one way."""

    way: str
    call: str
    areas: Areas

    def mean(self, kind: str) -> float:
        """Return the mean area over the rounds."""
        return float(np.mean(self.areas[kind]))

    def problems(self) -> Iterator[str]:
        """Yield what must not be."""
        if abs(self.mean("the other's") - 0.5) > LIMIT:
            yield f"{self.call}, {self.way}: the clock tells"
        if abs(self.mean("one's own") - 0.5) < CONTROL - 0.5:
            yield f"{self.call}, {self.way}: the clock would not have told"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=450, help="of each kind; half of them are stored")
    parser.add_argument("--rounds", type=int, default=1, help="of everything, with other prompts")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one; both unless given")
    parser.add_argument("--call", choices=("get", "put"), action="append", help="likewise")
    parser.add_argument("--kind", choices=KINDS, action="append", help="likewise; all three unless given")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    print_machine()
    rng, rows = random.Random(chosen.seed), []
    kinds: Sequence[str] = chosen.kind or KINDS
    with tempfile.TemporaryDirectory() as name:
        prepare(folder := Path(name))
        for way in chosen.way or WAYS:
            for call in chosen.call or ("get", "put"):
                row = TimingRow(way, call, {kind: [] for kind in kinds})
                rows.append(row)
                for _ in range(chosen.rounds):
                    for kind in kinds:
                        row.areas[kind].append(measure(folder, chosen.prompts, rng, way, call, kind))
                print(f"{call}, {way}: {row.areas}", file=sys.stderr, flush=True)
    deviation = chance(chosen.prompts, chosen.rounds)
    print("\nArea under the ROC curve of `the slower ones are stored`; 0.5: the clock says nothing.")
    print(
        f"Chance alone: {deviation:.3f} (one standard deviation), 19 of 20 within {1.96 * deviation:.3f}.\n"
    )
    cells = [(f"{row.call}, {row.way}", *(f"{row.mean(kind):.3f}" for kind in kinds)) for row in rows]
    print(render(("", *kinds), cells))
    if set(kinds) == set(KINDS) and (problems := [one for row in rows for one in row.problems()]):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
