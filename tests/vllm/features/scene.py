"""An engine with kvtier, and the comparison that each feature has to pass.

A prompt is computed, found in the engine's own cache, and, when the engine has forgotten it, in the
appliance. The last two must agree in every bit, the first with both in substance (see e2e/comparison.py). In
bfloat16 vLLM's own hit differs from what it computes; there only the bits of the hits count.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import EngineOptions, kvtier_connector
from bench.vllm.process import EngineDied, EngineProcess, Output

from .. import patience
from ..e2e.comparison import difference, exact_difference
from ..e2e.rig import SMALL, settled
from ..e2e.traffic import Traffic

Ask = dict[str, Any]
Record = Callable[[str, object], None]  # pytest's record_property: "refused" and the words go into the table
DARK = re.compile(r"kvtier serves nothing to this engine: (.*)")
PROBLEM = re.compile(r"(?m)^(?:\S.*?\s)?\w*(?:Error|Exception): (.+)$")


def connected(appliance: ApplianceProcess, options: EngineOptions = SMALL, **changes: Any) -> EngineOptions:
    """Return `options` with kvtier's connector."""
    return replace(options, connector=kvtier_connector(appliance.target, **patience.CONNECTOR), **changes)


@contextmanager
def engine_of(options: EngineOptions, folder: Path, name: str = "engine") -> Iterator[EngineProcess]:
    """Start an engine. Skips, with the engine's own words, where it does not start without kvtier either."""
    with EngineProcess(options, folder, name) as engine:
        try:
            engine.ready()
        except EngineDied:
            words = words_of(engine)
            with EngineProcess(replace(options, connector=None), folder, f"{name}-alone") as alone:
                try:
                    alone.ready()
                except EngineDied:
                    pytest.skip(f"this build of the engine cannot: {words_of(alone)}")
            pytest.fail(f"only with kvtier the engine does not start: {words}")
        yield engine


def words_of(engine: EngineProcess) -> str:
    """Return the last error in an engine's log."""
    found: list[str] = PROBLEM.findall(engine.log.read_text(errors="replace"))
    roots = [one for one in found if "Engine core" not in one and "EngineCore" not in one]
    return (roots or found or ["it ends as it starts, alone, too, and its log names no error"])[-1][:160]


def why_dark(engine: EngineProcess) -> str:
    """Return why kvtier serves nothing to an engine; empty when it serves."""
    found = DARK.search(engine.log.read_text(errors="replace"))
    return found[1] if found else ""


def assert_found_right(
    engine: EngineProcess, appliance: ApplianceProcess, ask: Ask, record: Record, is_exact: bool = True
) -> list[Output]:
    """Compute, find in the engine, find in kvtier; return the three answers. A refusal is recorded."""
    (computed,) = engine.generate(ask)
    (own,) = engine.generate(ask)
    settled(engine, appliance)
    (loaded,) = engine.generate(ask)
    assert {one.finish for one in (computed, loaded, own)} <= {"length", "stop"}
    if engine.options.dtype == "float32":
        assert not difference(computed, loaded)
        assert not difference(computed, own)
        assert [one.others for one in (loaded, own)] == [computed.others] * 2
    if why := why_dark(engine):
        assert loaded.num_cached == 0
        record("refused", why)
        return [computed, loaded, own]
    assert loaded.num_cached > 0, "nothing was found"
    assert own.num_cached == loaded.num_cached or engine.options.dtype == "float32", "nothing to compare with"
    if is_exact and own.num_cached == loaded.num_cached:
        assert not exact_difference(own, loaded)
    return [computed, loaded, own]


@contextmanager
def unless_it_dies_alone(
    options: EngineOptions, folder: Path, ask: Ask, others: dict[str, Any] | None = None
) -> Iterator[None]:
    """Skip, with the engine's own words, where it ends at this request without kvtier, too.

    `others`: the connector that it has without kvtier."""
    try:
        yield
    except EngineDied as problem:
        with engine_of(replace(options, connector=others), folder, "alone") as alone:
            try:
                for _ in range(2):
                    alone.generate(ask)
                alone.reset()
                alone.generate(ask)  # out of what others keep
            except EngineDied as own:
                pytest.skip(
                    f"this build of the engine cannot, alone neither: {str(own).splitlines()[0][:160]}"
                )
        raise AssertionError("only with kvtier the engine ends") from problem


def words(seed: int, num: int) -> list[int]:
    """Return a prompt of random tokens."""
    return Traffic(seed, SMALL.block_tokens, max_tokens=num).words(num)
