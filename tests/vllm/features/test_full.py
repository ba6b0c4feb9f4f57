"""An appliance that is full: misses, and every answer right."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.vllm.appliance import ApplianceProcess

from ..e2e.comparison import difference
from ..e2e.rig import SMALL
from .scene import connected, engine_of, words


@pytest.mark.parametrize("nvme", ["", "192MiB"], ids=["memory only", "with a small nvme"])
def test_full(nvme: str, tmp_path: Path) -> None:
    asks = [{"tokens": words(seed, 900), "num_new": 4} for seed in range(60)]  # 4 MiB each
    options = replace(SMALL, num_blocks=512, max_requests=4)
    with (
        ApplianceProcess(dram="32MiB", nvme=nvme) as appliance,
        engine_of(connected(appliance, options), tmp_path) as engine,
    ):
        expected = engine.generate(*asks)
        got = [output for ask in asks for output in engine.generate(ask)]
        assert {output.finish for output in (*expected, *got)} == {"length"}
        assert not [problem for pair in zip(expected, got, strict=True) if (problem := difference(*pair))]
        appliance.check_integrity()
