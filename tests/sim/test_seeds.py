"""Seeds of the simulator hold. Few of them, in every run: `python -m tests.sim` runs as many as it is told.

In a file of their own, so that one worker has these and another one the planted defects of test_sim.py."""

from collections import Counter
from collections.abc import Iterable

import pytest

from .expected import FIRST_EXPECTED_SEED
from .forks import FORKS
from .run import run_seed
from .source import FIRST_HOSTS_SEED, FIRST_SEED

both_modes = pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])


def play(seeds: Iterable[int], verify: bool) -> Counter[str]:
    """Run seeds, and return what was counted in all of them. Nothing may be violated."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        counts.update(outcome.counts)
    return counts


@both_modes
def test_nothing_is_violated(verify: bool) -> None:
    counts = play(range(150), verify)
    num_reads = counts["reads_verified"] + counts["one_sided_verified"]
    assert num_reads > 1500, "the seeds hardly read anything: they would see nothing"


@both_modes
def test_nothing_is_violated_where_chains_fork(verify: bool) -> None:
    counts = play(FORKS[:60], verify)
    assert counts["reads_verified"] > 300, "the seeds hardly read anything: they would see nothing"


@both_modes
@pytest.mark.parametrize(
    ("first_seed", "num_seeds", "used", "least"),
    [
        (FIRST_SEED, 75, ("fragments_fetched", "bundles_exported"), 50),
        (FIRST_HOSTS_SEED, 75, ("fragments_fetched", "tails_fetched"), 50),
        (FIRST_EXPECTED_SEED, 100, ("acquires_expecting", "fragments_fetched"), 200),
    ],
    ids=["with a source", "with other hosts", "while blocks are expected"],
)
def test_nothing_is_violated_beyond_one_host(
    first_seed: int, num_seeds: int, used: tuple[str, str], least: int, verify: bool
) -> None:
    counts = play(range(first_seed, first_seed + num_seeds), verify)
    assert min(counts[one] for one in used) > least, f"{used} hardly happened: the seeds would see nothing"
