"""Every row of the scorecard: its command at a size, and the figures that are read from what it printed.

Sizes at scale 1 take about 40 minutes together on two cores that nothing else uses.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .defects import DEFECTS
from .mends import mend_tests
from .readers import (
    Figures,
    read_chaos,
    read_daemon_loop,
    read_fleet,
    read_kept_loop,
    read_mends,
    read_mode_loop,
    read_mutants,
    read_overload,
    read_pytest,
    read_simulator,
    read_soak,
    read_store_loop,
    read_timing,
)

#: (size, number of the run) -> arguments of python; the number makes each run's seeds new.
Command = Callable[[int, int], list[str]]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is run. `goal` is what its sums over all runs must reach, by figure."""

    name: str
    what: str
    command: Command
    read: Callable[[str], Figures]
    size: int  # at scale 1: of what, `unit` says
    unit: str
    zero: str  # the figure that must be 0 in every run
    goal: tuple[str, float] | None = None
    is_fixed: bool = False  # a suite: there is no more of it


def _pytest(*targets: str) -> Command:
    return lambda size, run: ["-m", "pytest", "-q", "-p", "no:cacheprovider", *targets]


def defect_tests() -> list[str]:
    """Return the tests of all defects, each once."""
    return list(dict.fromkeys(test for defect in DEFECTS for test in defect.tests))


CLOCK_TESTS = [
    "tests/policies/test_robustness.py::test_the_clock_tells_requests_of_one_instant_apart_never_runs_backwards"
    "_and_is_right_again",
    "tests/policies/test_urgency.py::test_an_announced_return_is_as_far_off_by_a_clock_that_is_ahead",
    "tests/clients/fake/test_fake.py::test_leases_expire_by_the_given_clock",
]


ROWS = [
    Row(
        "seeds",
        "simulator: the planner on virtual tiers, with faults",
        lambda size, run: ["-m", "tests.sim", "--seeds", str(size), "--first-seed", str(run)],
        read_simulator,
        4000,
        "seeds, each in two modes",
        "violations",
        ("seeds", 1_000_000),
    ),
    Row(
        "failed seeds",
        "the seeds that failed once, in both modes",
        _pytest("tests/sim/test_sim.py", "-k", "failed_once or few_segments"),
        read_pytest,
        1,
        "list",
        "failed",
        is_fixed=True,
    ),
    Row(
        "mutants",
        "defects planted in the planner, the whole list",
        _pytest("tests/sim/test_sim.py", "-k", "test_mutant_is_killed"),
        read_mutants,
        1,
        "list",
        "alive",
        is_fixed=True,
    ),
    Row(
        "store kills",
        "kill -9 of a process that writes the cold store",
        lambda size, run: ["-m", "tests.crash.store_loop", "--iterations", str(size), "--seed", str(run)],
        read_store_loop,
        500,
        "kills",
        "lost",
        ("kills", 10_000),
    ),
    Row(
        "encrypted store kills",
        "the same, encrypted, while the master key is exchanged",
        lambda size, run: [
            *("-m", "tests.crash.store_loop", "--encrypted"),
            *("--iterations", str(size), "--seed", str(run)),
        ],
        read_store_loop,
        100,
        "kills",
        "lost",
    ),
    Row(
        "overlay",
        "the same on an overlay file system, a container's without a volume",
        lambda size, run: ["-m", "tests.crash.overlay", "--iterations", str(size), "--seed", str(run)],
        read_store_loop,
        100,
        "kills",
        "lost",
    ),
    Row(
        "daemon kills",
        "kill -9 of supervisor and daemon under load; nvme is read back",
        lambda size, run: ["-m", "tests.crash.daemon_loop", "--iterations", str(size), "--seed", str(run)],
        read_daemon_loop,
        60,
        "kills",
        "lost",
        ("kills", 1_000),
    ),
    Row(
        "kept memory kills",
        "kill -9 of the daemon under load; memory is read back",
        lambda size, run: ["-m", "tests.crash.kept_loop", "--iterations", str(size), "--seed", str(run)],
        read_kept_loop,
        40,
        "kills",
        "lost",
        ("kills", 1_000),
    ),
    Row(
        "kills by mode",
        "kill -9 after a rest and under load, for each `tiers.nvme.write`",
        lambda size, run: ["-m", "tests.crash.mode_loop", "--iterations", str(size), "--seed", str(run)],
        read_mode_loop,
        2,
        "kills for each mode and load",
        "lost",
    ),
    Row(
        "chaos",
        "mixed load of two tenants under kills, stops, disk faults and reloads",
        lambda size, run: ["-m", "tests.chaos", "--seconds", str(size), "--seed", str(run)],
        read_chaos,
        180,
        "seconds",
        "wrong",
    ),
    Row(
        "fleet",
        "three hosts in network namespaces under kills, stops, cuts in one and both ways, slow links",
        lambda size, run: ["-m", "tests.chaos.fleet", "--seconds", str(size), "--seed", str(run)],
        read_fleet,
        120,
        "seconds",
        "wrong",
        ("seconds", 1_800),
    ),
    Row(
        "soak",
        "mixed load with ever new sessions; a client that holds leases is killed every 10 s",
        lambda size, run: ["-m", "tests.chaos.soak", "--minutes", str(size)],
        read_soak,
        8,
        "minutes",
        "left",
        ("minutes", 60),
    ),
    Row(
        "overload",
        "callers of the gRPC port at ten times what it can answer",
        lambda size, run: ["-m", "bench.overload", "--seconds", str(size)],
        read_overload,
        8,
        "seconds for each load",
        "cancelled",
    ),
    Row(
        "timing",
        "what response times tell of another tenant: area under the ROC curve",
        # Memory has room for 150 prompts without an eviction; of 6 rounds chance makes 0.019: a limit that is
        # 0.05 away errs in one of a hundred.
        lambda size, run: [
            *("-m", "bench.timing", "--prompts", "150"),
            *("--rounds", str(size), "--seed", str(run)),
        ],
        read_timing,
        6,
        "rounds of 150 prompts of each kind",
        "told",
    ),
    Row(
        "field defects",
        f"{len(DEFECTS)} defects of other stores, each with its regression",
        lambda size, run: ["-m", "pytest", "-q", "-p", "no:cacheprovider", *defect_tests()],
        read_pytest,
        1,
        "list",
        "failed",
        is_fixed=True,
    ),
    Row(
        "disk faults",
        "ENOSPC, EIO, short and torn writes, no direct I/O, damaged directories",
        _pytest(
            *(
                "tests/e2e/test_bad_disk.py",
                "tests/tiers/cold/test_store.py",
                "tests/tiers/cold/test_store_failures.py",
                "tests/tiers/cold/test_restarts.py",
                "tests/tiers/cold/test_model.py",
            ),
            "tests/appliance/core/copying/test_refusals.py",
        ),
        read_pytest,
        1,
        "suite",
        "failed",
        is_fixed=True,
    ),
    Row(
        "mends",
        "the attack of 2026-11-21 on tenants, overload and files, repeated",
        _pytest("-p", "tests.scorecard.figures", *mend_tests()),
        read_mends,
        1,
        "list",
        "failed",
        is_fixed=True,
    ),
    Row(
        "clock jumps",
        "clocks that are put back or stand ahead: write budget, policies (the simulator's jump, too)",
        _pytest("tests/appliance/persisted/test_writes_file.py", *CLOCK_TESTS),
        read_pytest,
        1,
        "suite",
        "failed",
        is_fixed=True,
    ),
    Row(
        "hostile client",
        "forged ids, malformed and oversized calls, unfinished puts, attacks on shared memory",
        _pytest(
            *("tests/e2e/test_bad_input.py", "tests/e2e/test_unfinished_puts.py"),
            *("tests/tiers/cold/test_attacks.py", "tests/appliance/server/test_local_server.py"),
            "tests/security/test_matrix.py",
        ),
        read_pytest,
        1,
        "suite",
        "failed",
        is_fixed=True,
    ),
    Row(
        "hostile daemon",
        "answers that lie, are malformed, late or without end",
        _pytest("tests/clients/links/test_hostile_daemon.py"),
        read_pytest,
        1,
        "suite",
        "failed",
        is_fixed=True,
    ),
    Row(
        "hostile files",
        "damaged stores and snapshots, pipes and hanging files in place of a policy, keys or tokens",
        _pytest(
            *("tests/e2e/test_administrators_files.py", "tests/tiers/cold/test_damage.py"),
            *("tests/tiers/cold/test_manifest.py", "tests/tiers/cold/test_record.py"),
            "tests/tiers/encryption/test_tenant_keys.py",
        ),
        read_pytest,
        1,
        "suite",
        "failed",
        is_fixed=True,
    ),
]


def arguments_of(row: Row, scale: float, run: int) -> tuple[list[str], int]:
    """Return the command of a row, and its size."""
    size = row.size if row.is_fixed else max(1, round(row.size * scale))
    return row.command(size, run), size


def as_typed(arguments: Sequence[str]) -> str:
    """Return a command as it is typed."""
    return shlex.join(["python", *arguments])


def python() -> str:
    """Return the interpreter that rows are run with."""
    return str(Path(sys.executable))
