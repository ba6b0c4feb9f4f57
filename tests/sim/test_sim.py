"""The simulator's own tests: seeds hold, runs repeat, planted defects are seen."""

import os
import subprocess
import sys

import pytest

from kvtier.appliance.core.requests import put_job

from .mutants import MUTANTS, Mutant, Patch, hunt
from .run import run_seed

SEEDS = range(300)


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "unmask"])
def test_nothing_is_violated(verify: bool) -> None:
    num_reads = 0
    for seed in SEEDS:
        outcome = run_seed(seed, verify)
        assert not outcome.check, f"seed {seed}: {outcome.message}\n{outcome.trace_back}"
        num_reads += outcome.counts["reads_verified"] + outcome.counts["one_sided_verified"]
    assert num_reads > 10 * len(SEEDS), "the seeds hardly read anything: they would see nothing"


@pytest.mark.parametrize("seed", [500, 1226, 3241, 5911])
def test_a_part_of_a_block_does_not_go_to_and_fro_between_memories(seed: int) -> None:
    """The second memory had room for a part, evicted that, and the first one copied it again, for ever."""
    outcome = run_seed(seed, True)
    assert not outcome.check, f"{outcome.message}\n{outcome.trace_back}"


def test_same_seed_same_log() -> None:
    for seed in range(20):
        assert run_seed(seed, True).fingerprint == run_seed(seed, True).fingerprint


def test_same_log_whatever_the_hash_seed() -> None:
    """Nothing may depend on the order of a set of strings."""
    code = "from tests.sim.run import run_seed; print([run_seed(s, True).fingerprint for s in range(12)])"
    logs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(["src", "."])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(logs) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_is_killed(mutant: Mutant) -> None:
    """A planted defect is seen within a bounded number of seeds, in one mode or the other."""
    hunts = (hunt(mutant, verify, range(2000), stop_at_first=True) for verify in (False, True))
    assert any(kill.num_killed for kill in hunts), mutant.what


@pytest.mark.parametrize(
    "patch",
    [
        (put_job.PutJob, "_finish_if_landed", lambda self: self.name_that_is_gone),
        (put_job.PutJob, "landed", lambda self: None),
        (put_job.PutJob, "name_that_is_gone", lambda self: None),
    ],
    ids=["asks for a name", "has other arguments", "replaces a name"],
)
def test_a_mutant_that_does_not_fit_the_code_is_no_kill(patch: Patch) -> None:
    mutant = Mutant("former", "breaks code that is gone", lambda: [patch])
    with pytest.raises(AssertionError, match="the mutant former is stale"):
        hunt(mutant, True, range(20), stop_at_first=True)
