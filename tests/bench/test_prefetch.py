"""The bench of prefetching at a small size: what is known ahead is there, and what is waited for is said."""

import argparse
from pathlib import Path

import pytest

from bench.prefetch import CASES, run, sample_of
from kvtier.appliance.replay.readers import read_trace

#: Four conversations of three turns, a hundred seconds apart; dram holds one of them.
TURN_S, NUM_CHATS, CHAIN = 100.0, 4, 6


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    lines = []
    for turn in range(3):
        for chat in range(NUM_CHATS):
            at_ms = int((turn * NUM_CHATS + chat) * TURN_S * 1000)
            ids = [100 * chat + position for position in range(CHAIN + turn)]
            lines.append(
                f'{{"timestamp": {at_ms}, "input_length": {512 * len(ids)}, "output_length": 10, '
                f'"hash_ids": {ids}, "session": {chat}}}'
            )
    trace = tmp_path / "chats.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    return argparse.Namespace(
        trace=trace,
        requests=0,
        every=1,
        dram="30%",
        queue=0.1,
        tool=1000.0,
        error=1.0,
        eviction="lru",
        groups=1,
        horizon=20.0,
    )


def row_of(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one case."""
    (case,) = [case for case in CASES if case.name == name]
    return run(case, arguments)[1]


def test_the_oracle_has_there_what_may_be_there(arguments: argparse.Namespace) -> None:
    nothing, oracle = row_of("nothing ahead", arguments), row_of("oracle", arguments)
    assert (nothing["there"], nothing["begun"]) == (0.0, 0.0)
    assert nothing["wait p50"] > 0.01, "it has to come from nvme"
    assert oracle["there"] == pytest.approx(4 / 13), "2 of 6 and 2 of 7 blocks: a quarter of dram's 10 blocks"
    assert oracle["wasted"] == 0.0
    assert oracle["wait p50"] < nothing["wait p50"]


def test_prefill_begins_with_the_layers_that_are_there(arguments: argparse.Namespace) -> None:
    whole = row_of("nothing ahead", arguments)
    arguments.groups = 4
    layered = row_of("nothing ahead", arguments)
    assert layered["wait p50"] < whole["wait p50"]


def test_a_sample_holds_whole_sessions(arguments: argparse.Namespace) -> None:
    trace = sample_of(read_trace(arguments.trace), 0, every=2)
    assert list(trace.sessions) == ["0", "2"] * 3
    assert list(sample_of(read_trace(arguments.trace), 4, every=1).sessions) == ["0", "1", "2", "3"]
