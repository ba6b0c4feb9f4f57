"""In which order the fragments of a delivery are enqueued, whatever tiers they are in."""

import numpy as np
import pytest

from kvtier.appliance.gpu.deliveries import Ready
from kvtier.tiers.block import Tier


@pytest.mark.parametrize("by_group", [True, False])
def test_first_layers_go_first_in_runs_that_one_copy_can_serve(by_group: bool) -> None:
    """An event of a layer group is recorded before the first run of a later one: a run of an earlier group
    after that, from another tier, would not be vouched for."""
    rng = np.random.default_rng(3)
    groups, tiers = rng.integers(0, 4, 64), rng.choice([int(Tier.HBM), int(Tier.DRAM)], 64)
    ready = Ready(np.arange(64), groups, tiers, np.arange(64) * 7)
    runs = list(ready.runs(by_group=by_group))
    assert sorted(np.concatenate(runs).tolist()) == list(range(64))
    assert all(len(set(tiers[run])) == 1 for run in runs)
    assert all((np.diff(groups[run]) >= 0).all() for run in runs)
    if by_group:
        assert all(len(set(groups[run])) == 1 for run in runs)
        assert (np.diff([groups[run[0]] for run in runs]) >= 0).all()
    assert len(runs) == (8 if by_group else 2)
    assert list(Ready(*(np.empty(0, np.int64),) * 4).runs(by_group=by_group)) == []
