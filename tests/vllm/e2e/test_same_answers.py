"""A hit in kvtier answers as a hit in vLLM's own cache does: same tokens, same log-probabilities, every bit.

Several conversations in turns, shared system prompts, tenants with salts; in mid-run the engine is
restarted (once with its own cache switched off) and the appliance, too: after that every hit comes from
NVMe.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from .comparison import Tally
from .rig import FULL, SEED, SMALL, Rig, rig
from .traffic import Traffic

NUM_REQUESTS = int(os.environ.get("REQUESTS", "240" if FULL else "48"))


def run(engines: Rig, traffic: Traffic, tally: Tally, num_requests: int) -> None:
    for _ in range(num_requests):
        engines.ask(traffic.turn(), tally, traffic)
        if not tally.num_requests % 10:
            engines.settle()
            engines.appliance.check_integrity()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_answer_as_the_engines_own_do(dtype: str, tmp_path: Path) -> None:
    tally = Tally(SEED)
    traffic = Traffic(SEED, SMALL.block_tokens, max_tokens=1500, may_align=dtype == "float32")
    with rig(tmp_path, replace(SMALL, dtype=dtype)) as engines:
        part = NUM_REQUESTS // 4
        run(engines, traffic, tally, part)
        engines.restart_subject()
        run(engines, traffic, tally, part)
        engines.settle()
        engines.appliance.leave_dram()
        engines.wake_with(traffic)
        run(engines, traffic, tally, part)
        if FULL or dtype == "bfloat16":
            engines.restart_subject(prefix_caching=False)
        run(engines, traffic, tally, part)
        engines.settle()
        print(f"\n{dtype}, {tally}")
    assert tally.mismatches == []
    assert tally.num_hits > tally.num_requests // 2, tally
    assert tally.num_exact > tally.num_requests * 3 // 4, tally
