"""Cache saved at equal hits: by hand, at the ends of a sweep, and from a replay."""

import json
from math import sqrt
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.appliance.cli.app import cli
from kvtier.appliance.replay.outcomes import Outcome
from kvtier.appliance.replay.savings import savings

from .traces import request, write

GIB = 1 << 30


def outcome(policy: str, gib: int, percent: int) -> Outcome:
    """Return an outcome of one tier with this hit ratio."""
    return Outcome(
        label=f"{policy} {gib}GiB",
        policy=policy,
        capacity=f"{gib}GiB",
        capacity_bytes={"dram": gib * GIB},
        num_requests=1,
        num_blocks=100,
        num_tokens=100,
        block_hits={"dram": percent},
        token_hits={"dram": percent},
        prefill_s=0.0,
        prefill_saved_s=0.0,
        edge_bytes={},
        duration_s=1.0,
    )


def test_what_a_better_policy_needs_lies_between_two_sizes() -> None:
    swept = [outcome("lru", 2, 20), outcome("lru", 4, 40), outcome("new", 1, 10), outcome("new", 4, 70)]
    first, second = savings(swept)
    assert (first.policy, first.capacity, first.token_hit_ratio) == ("new", "2GiB", 0.2)
    assert first.needed_bytes == pytest.approx(4 ** (1 / 6) * GIB)
    assert second.needed_bytes == pytest.approx(2 * GIB)  # half of the way from 1 to 4 GiB, in doublings
    assert second.saved_share == pytest.approx(0.5)
    assert not second.is_bound


def test_nothing_is_extrapolated() -> None:
    lru = [outcome("lru", 2, 20), outcome("lru", 4, 40)]
    (bound,) = savings([*lru, outcome("good", 2, 50), outcome("good", 4, 60)])
    assert (bound.capacity, bound.needed_bytes, bound.is_bound) == ("4GiB", 2 * GIB, True)
    assert savings([*lru, outcome("bad", 2, 5), outcome("bad", 4, 10)]) == []
    (worse,) = savings([*lru, outcome("worse", 2, 10), outcome("worse", 4, 30)])
    assert worse.needed_bytes == pytest.approx(2 * sqrt(2) * GIB)
    assert worse.saved_share < 0
    assert savings([outcome("lru", 2, 20), outcome("new", 2, 30)]) == []
    assert savings([outcome("fifo", 2, 20), outcome("fifo", 4, 30)]) == []


def test_a_replay_of_a_named_model_prints_them(tmp_path: Path) -> None:
    """Two prompts in turn between others that never come back: lru needs room for both."""
    lines = []
    for turn in range(60):
        lines.append(request(1000 * turn, list(range(4 * (turn % 2), 4 * (turn % 2) + 4))))
        lines.append(request(1000 * turn + 500, [1000 + turn]))
    path = write(tmp_path / "trace.jsonl", [json.dumps(line) for line in lines])
    words = ["replay", path, "--policy", "lru", "--policy", "clairvoyant", "--model", "deepseek-v3"]
    words += ["--capacity", "128MiB,256MiB,384MiB,512MiB", "--jobs", 1]
    done = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["savings"], found
    assert all(one["policy"] == "clairvoyant" and one["saved_share"] >= 0 for one in found["savings"])
    text = CliRunner().invoke(cli, list(map(str, words))).output
    for heading in ("ideally", "saved", "speed-up"):
        assert heading in text
