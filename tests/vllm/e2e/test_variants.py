"""Other shapes of engine: two workers that hold half of the heads each, and layers that see a window only."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.vllm.options import EngineOptions

from .comparison import Tally
from .rig import FULL, SEED, SMALL, rig
from .traffic import Traffic

NUM_REQUESTS = 24
VARIANTS = {
    "two workers": replace(SMALL, num_workers=2, in_one_process=False),
    "sliding windows": replace(SMALL, model="hybrid"),
    "large blocks": replace(SMALL, block_tokens=128, num_blocks=1024, dtype="bfloat16"),
}


@pytest.mark.skipif(not FULL, reason="six more engines: FULL=1 make test-vllm")
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_hits_answer_as_the_engines_own_do(options: EngineOptions, tmp_path: Path) -> None:
    tally = Tally(SEED)
    traffic = Traffic(SEED, options.block_tokens, max_tokens=1500, may_align=False)
    with rig(tmp_path, options) as engines:
        for _ in range(NUM_REQUESTS):
            engines.ask(traffic.turn(), tally, traffic)
        engines.appliance.check_integrity()
    print(f"\n{tally}")
    assert tally.mismatches == []
    assert tally.num_hits > NUM_REQUESTS // 2
    assert tally.num_exact > NUM_REQUESTS // 2
