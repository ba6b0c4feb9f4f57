"""The timing classifier: it tells what there is to tell, and it is who it says it is."""

import random
from pathlib import Path

import numpy as np
import pytest

from bench import timing


def test_the_area_says_which_are_slower_and_how_surely() -> None:
    is_stored = [True] * 50 + [False] * 50
    noise = np.random.default_rng(1).normal(size=100)
    assert timing.area(noise + 10 * np.array(is_stored), is_stored) == 1.0
    assert timing.area(noise - 10 * np.array(is_stored), is_stored) == 0.0
    assert abs(timing.area(noise, is_stored) - 0.5) < 3 * timing.chance(100, 1)


def test_chance_is_what_it_is_called() -> None:
    """Against many areas between which there is no difference."""
    dice, is_stored = np.random.default_rng(2), [True] * 30 + [False] * 30
    areas = [timing.area(dice.normal(size=60), is_stored) for _ in range(2000)]
    assert np.std(areas) == pytest.approx(timing.chance(60, 1), rel=0.05)
    assert np.mean(areas) == pytest.approx(0.5, abs=0.01)


def test_what_else_the_machine_does_is_taken_out() -> None:
    """A machine that becomes three times as slow halfway, and calls that differ by a tenth."""
    dice = np.random.default_rng(3)
    is_stored = dice.random(2000) < 0.5
    times = (1000 + 100 * is_stored + dice.normal(0, 10, 2000)) * np.where(np.arange(2000) < 1000, 1, 3)
    assert timing.area(times, is_stored.tolist()) < 0.8
    assert timing.area(timing.without_drift(times), is_stored.tolist()) > 0.99


def test_the_attacker_is_another_tenant_and_its_late_put_is_a_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`probe` asserts of every call that it found what the attacker stored itself, and nothing else."""
    monkeypatch.setenv("KVTIER_TOKEN_FILE", "")  # the bench changes it
    monkeypatch.setattr(timing, "NUM_WARM", 1)
    monkeypatch.setattr(timing, "PART_BLOCKS", {"gRPC": 3})
    monkeypatch.setattr(timing, "SETTLE_S", 0.0)
    monkeypatch.setattr(timing, "WINDOW", 3)
    timing.prepare(tmp_path)
    policy = tmp_path / "policy.yaml"
    policy.write_text(policy.read_text().replace("4GiB", "128MiB"))
    found = timing.measure(tmp_path, 4, random.Random(1), "gRPC", "put", "the other's")
    assert 0.0 <= found <= 1.0
