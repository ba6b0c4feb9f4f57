"""Small traces for the tests, written down or drawn from a seed."""

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

from kvtier.appliance.replay.request_lines import read_requests
from kvtier.appliance.replay.traces import Trace

BLOCK_TOKENS = 512


def request(at_ms: float, ids: list[int], num_tokens: int | None = None, **more: Any) -> dict[str, Any]:
    """Return one request of a Mooncake-style trace."""
    tokens = len(ids) * BLOCK_TOKENS if num_tokens is None else num_tokens
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 1, "hash_ids": ids, **more}


def trace_of(*requests: dict[str, Any]) -> Trace:
    """Return a trace of these requests."""
    lines = [(number, json.dumps(line)) for number, line in enumerate(requests, 1)]
    return read_requests(lines, Path("trace.jsonl"))


def write(path: Path, lines: list[str]) -> Path:
    """Write lines, compressed when the name says so."""
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def drawn(seed: int, num_requests: int = 150, num_sessions: int = 12) -> Trace:
    """Return sessions that grow turn by turn over a few shared beginnings."""
    rng = Random(seed)
    numbers = iter(range(1, 1_000_000))
    shared = [[next(numbers) for _ in range(rng.randint(1, 6))] for _ in range(4)]
    chains = {f"s{n}": list(rng.choice(shared)) for n in range(num_sessions)}
    requests, at_ms = [], 0.0
    for _ in range(num_requests):
        at_ms += rng.expovariate(1 / 500)
        name = rng.choice(list(chains))
        if rng.random() < 0.1:
            chains[name] = list(rng.choice(shared))
        if rng.random() < 0.8:  # else the same prompt again
            chains[name] += [next(numbers) for _ in range(rng.randint(1, 9))]
        ids = chains[name]
        partial = rng.randint(1, BLOCK_TOKENS)
        requests.append(request(at_ms, list(ids), (len(ids) - 1) * BLOCK_TOKENS + partial, session=name))
    return trace_of(*requests)
