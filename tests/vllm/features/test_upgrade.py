"""One engine feeds the next version: two versions on one daemon, which is upgraded under both, first with a
drain and a start, then as users are told to: `kvtier restart`.

The version before this environment's is wanted, too: `make VERSION=... .venv-vllm-.../.ready` makes its own.
Without it this is skipped.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from bench.machine import ROOT
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.process import EngineProcess, Output
from kvtier.clients.vllm.versions import TESTED, minor_of

from ..e2e.comparison import difference
from ..e2e.rig import SMALL, WAIT_S, settled
from .scene import connected, words


def before() -> tuple[str, Path]:
    """Return the version before this environment's, and the Python of its environment."""
    minors = [minor_of(version) for version in TESTED]
    index = minors.index(minor_of(metadata.version("vllm")))
    if not index:
        pytest.skip(f"{TESTED[0]} is the oldest version that is served")
    version = f"{TESTED[index - 1]}.0"
    python = ROOT / f".venv-vllm-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make VERSION={version} .venv-vllm-{version}/.ready")
    return version, python


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[ApplianceProcess, EngineProcess, EngineProcess]]:
    version, python = before()
    with ExitStack() as stack:
        appliance = stack.enter_context(ApplianceProcess())
        options = connected(appliance, replace(SMALL, environment={"PYTHONHASHSEED": "0"}))
        old = stack.enter_context(EngineProcess(options, tmp_path, f"vllm-{version}", str(python)))
        new = stack.enter_context(EngineProcess(options, tmp_path, "vllm-new"))
        yield appliance, old.ready(), new.ready()


def find_again(engine: EngineProcess, seed: int, expected: Output) -> None:
    """Ask for a stored prompt until it is found. Raises AssertionError for a wrong answer or none in time."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        engine.reset()
        (got,) = engine.generate({"tokens": words(seed, 400), "num_new": 8})
        assert not difference(expected, got)
        if got.num_cached:
            return
        assert time.monotonic() < deadline_s, f"{engine.name} never found kvtier again"


def test_each_finds_what_the_other_stored_also_after_an_upgrade_of_kvtier(
    engines: tuple[ApplianceProcess, EngineProcess, EngineProcess], tmp_path: Path
) -> None:
    appliance, old, new = engines
    expected = {}
    for number, (one, other) in enumerate(((old, new), (new, old))):
        ask = {"tokens": words(number, 400), "num_new": 8}
        (expected[number],) = one.generate(ask)
        settled(one, appliance)
        (got,) = other.generate(ask)
        assert got.num_cached > 0, f"{other.name} found nothing of {one.name}"
        assert not difference(expected[number], got)
        settled(other, appliance)
    appliance.stop()
    during = [engine.generate({"tokens": words(0, 400), "num_new": 8})[0] for engine in (old, new)]
    assert not [problem for one in during if (problem := difference(expected[0], one))]
    appliance.start()
    for engine in (old, new):
        find_again(engine, 1, expected[1])
    command = [sys.executable, "-m", "kvtier.appliance.cli", "restart", "--target", appliance.target]
    subprocess.run([*command, "--wait", f"{WAIT_S:.0f}s"], check=True)
    for engine in (old, new):
        find_again(engine, 0, expected[0])
    appliance.check_integrity()


def test_another_layout_is_not_found(
    engines: tuple[ApplianceProcess, EngineProcess, EngineProcess], tmp_path: Path
) -> None:
    appliance, old, _ = engines
    ask = {"tokens": words(2, 400), "num_new": 8, "logprobs": False}
    old.generate(ask)
    settled(old, appliance)
    with EngineProcess(replace(old.options, dtype="bfloat16"), tmp_path, "of-bfloat16") as other:
        (got,) = other.generate(ask)
        assert got.num_cached == 0
