"""Hints that replay makes up: what they say, and that policies are told."""

from pathlib import Path

import numpy as np
import pytest

from kvtier.appliance.replay.hints import Hints, with_hints
from kvtier.appliance.replay.traces import SessionHint, Trace, TraceBuilder, TraceNamespace


@pytest.fixture
def trace() -> Trace:
    """Three requests of `anna`, 10 s apart, among those of sessions of one request, and one without."""
    builder = TraceBuilder("hints", Path("hints.jsonl"))
    builder.add_namespace(TraceNamespace(16))
    for number in range(400):
        session = "" if number == 7 else "anna" if number % 10 == 0 and number < 30 else f"once-{number}"
        hint = SessionHint(num_decoded_tokens=5)
        builder.add(
            float(number), [number], num_tokens=16, num_asked=1, num_filled=1, session=session, hint=hint
        )
    return builder.build()


def test_clairvoyant_hints_are_right(trace: Trace) -> None:
    hints = with_hints(trace, "clairvoyant").hints
    assert [hints[number].back_in_s for number in (0, 10)] == pytest.approx([10.0, 10.0])
    assert [hints[number].is_end for number in (0, 10, 20)] == [False, False, True]
    assert all(hints[number].is_end for number in range(1, 400) if number not in (7, 10))
    assert hints[7] == trace.hints[7], "a request without a session says nothing"
    assert {hint.num_decoded_tokens for hint in hints.values()} == {5}


def test_noisy_hints_are_wrong_as_often_as_they_say(trace: Trace) -> None:
    hints = with_hints(trace, "noisy").hints
    ends = [hints[number].is_end for number in range(1, 400) if number not in (7, 10)]
    assert 0.7 < np.mean(ends) < 0.9
    assert hints == with_hints(trace, "noisy").hints, "every policy is told the same"
    assert trace.hints[0] == SessionHint(num_decoded_tokens=5), "the trace itself stays as it was"


@pytest.mark.parametrize("kind", ["clairvoyant", "noisy"])
def test_the_command_takes_them(kind: Hints, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvtier.appliance.cli.replay import replay

    path = tmp_path / "agents.jsonl"
    line = '{{"timestamp": {at}, "input_length": 512, "hash_ids": [{name}], "session": "{session}"}}\n'
    path.write_text("".join(line.format(at=1000 * n, name=n % 4, session=n % 3) for n in range(40)))
    ran = CliRunner().invoke(replay, [str(path), "--policy", "urgency", "--hints", kind, "--jobs", "1"])
    assert ran.exit_code == 0, ran.output
