"""Seeds of the simulator hold. Few of them, in every run: `python -m tests.sim` runs as many as it is told.

In a file of their own, so that one worker has these and another one the planted defects of test_sim.py."""

import pytest

from .expected import FIRST_EXPECTED_SEED
from .forks import FORKS
from .run import run_seed
from .source import FIRST_HOSTS_SEED, FIRST_SEED

SEEDS = range(150)


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])
def test_nothing_is_violated(verify: bool) -> None:
    num_reads = 0
    for seed in SEEDS:
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        num_reads += outcome.counts["reads_verified"] + outcome.counts["one_sided_verified"]
    assert num_reads > 10 * len(SEEDS), "the seeds hardly read anything: they would see nothing"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])
def test_nothing_is_violated_where_chains_fork(verify: bool) -> None:
    num_reads = 0
    for seed in FORKS[:60]:
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        num_reads += outcome.counts["reads_verified"]
    assert num_reads > 300, "the seeds hardly read anything: they would see nothing"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])
def test_nothing_is_violated_with_a_source(verify: bool) -> None:
    num_fetched = num_exported = 0
    for seed in range(FIRST_SEED, FIRST_SEED + 75):
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        num_fetched += outcome.counts["fragments_fetched"]
        num_exported += outcome.counts["bundles_exported"]
    assert min(num_fetched, num_exported) > 50, "the source was hardly used: the seeds would see nothing"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])
def test_nothing_is_violated_with_other_hosts(verify: bool) -> None:
    num_tails = num_fetched = 0
    for seed in range(FIRST_HOSTS_SEED, FIRST_HOSTS_SEED + 75):
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        num_fetched += outcome.counts["fragments_fetched"]
        num_tails += outcome.counts["tails_fetched"]
    assert min(num_fetched, num_tails) > 50, "hosts were hardly asked: the seeds would see nothing"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])
def test_nothing_is_violated_while_blocks_are_expected(verify: bool) -> None:
    num_expecting = num_fetched = 0
    for seed in range(FIRST_EXPECTED_SEED, FIRST_EXPECTED_SEED + 100):
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        num_expecting += outcome.counts["acquires_expecting"]
        num_fetched += outcome.counts["fragments_fetched"]
    assert min(num_expecting, num_fetched) > 200, "hardly anything was expected: the seeds would see nothing"
