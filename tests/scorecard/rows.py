"""Every row of the scorecard: its command at a size, and the figures that are read from what it printed.

Sizes at scale 1 take about 40 minutes together on two cores that nothing else uses.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.content import GEOMETRY
from tests.crash.daemon_loop import GEOMETRY as LOOP_GEOMETRY

from .defects import DEFECTS

Figures = dict[str, float]
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


def _found(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in what was printed:\n{text[-2000:]}")
    return float(match[1])


def _last_object(text: str) -> dict[str, Any]:
    """Return the JSON object in the last line. Raises ValueError."""
    found = json.loads((text.strip().splitlines() or ["nothing was printed"])[-1])
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} is no object")
    return found


def _pytest(*targets: str) -> Command:
    return lambda size, run: ["-m", "pytest", "-q", "-p", "no:cacheprovider", *targets]


def read_pytest(printed: str) -> Figures:
    """Return how many tests passed, failed and were skipped. Raises ValueError when none ran."""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", printed)}
    if not counts.get("passed") and not counts.get("failed"):
        raise ValueError(f"no test ran:\n{printed[-2000:]}")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return {"passed": counts.get("passed", 0), "failed": failed, "skipped": counts.get("skipped", 0)}


def read_simulator(printed: str) -> Figures:
    """Return seeds (each counted in each of its two modes), events, injected faults and violations."""
    runs = re.findall(r"(\d+) seeds, (\d+) events.*?(\d+) violations\n  (.*)", printed)
    if not runs:
        raise ValueError(f"no seed ran:\n{printed[-2000:]}")
    not_faults = {"put_answered", "reads_verified", "one_sided_verified", "one_sided_misses", "idle_copies"}
    faults = [
        int(count)
        for run in runs
        for name, count in re.findall(r"(\w+) (\d+)", run[3])
        if name not in not_faults
    ]
    return {
        "seeds": sum(int(run[0]) for run in runs),
        "events": sum(int(run[1]) for run in runs),
        "faults": sum(faults),
        "violations": sum(int(run[2]) for run in runs),
    }


def read_mutants(printed: str) -> Figures:
    """Return how many mutants there are, and how many were not killed."""
    counts = read_pytest(printed)
    return {"mutants": counts["passed"] + counts["failed"], "alive": counts["failed"]}


def read_store_loop(printed: str) -> Figures:
    """Return kills and records that were verified. The loop ends at the first wrong byte or lost record."""
    return {
        "kills": _found(r"num_kills=(\d+)", printed),
        "verified_bytes": _found(r"num_verified=(\d+)", printed) * _MEAN_RECORD_BYTES,
        "acknowledged": _found(r"num_acknowledged=(\d+)", printed),
        "lost": _found(r"num_sealed_lost=(\d+)", printed),
    }


_MEAN_RECORD_BYTES = (100 + 4096 + 9000 + 30_000 + 65_536) / 5  # store_loop.LENGTHS


def read_daemon_loop(printed: str) -> Figures:
    """Return kills, bytes that were read and right, sealed blocks that were lost."""
    blocks = _found(r"read (\d+) alive", printed) + _found(r"and (\d+) after a restart", printed)
    return {
        "kills": _found(r"(\d+) kills;", printed),
        "verified_bytes": blocks * LOOP_GEOMETRY.block_bytes,
        "lost": _found(r"lost (\d+);", printed),
        "worst_start_s": _found(r"at worst ([\d.]+) s", printed),
    }


def read_kept_loop(printed: str) -> Figures:
    """Return kills, bytes that were read and right, acknowledged blocks that were not found."""
    last = (printed.strip().splitlines() or [""])[-1]
    found = _found(r"(\d+) found", last)
    return {
        "kills": _found(r"(\d+) kills", last),
        "verified_bytes": found * LOOP_GEOMETRY.block_bytes,
        "lost": _found(r"(\d+) blocks asked for", last) - found,
        "mean_down_s": _found(r"mean time to an answer ([\d.]+) s", last),
    }


def read_mode_loop(printed: str) -> Figures:
    """Return kills over all modes, and what `idle` lost after a rest, which must be nothing."""
    rest = r"idle +after.*?"
    lost = _found(rest + r"(\d+) blocks put", printed) - _found(rest + r"(\d+) found", printed)
    return {"kills": sum(int(n) for n in re.findall(r"(\d+) kills, ", printed)), "lost": lost}


def read_chaos(printed: str) -> Figures:
    """Return faults, bytes that were read and right, witnesses asked for and found."""
    counts = _last_object(printed)
    return {
        "faults": len(re.findall(r"(?m)^ *[\d.]+ s  ", printed)),
        "verified_bytes": counts["blocks verified"] * GEOMETRY.block_bytes,
        "witnesses": _found(r"of (\d+) witnesses", printed),
        "witnesses_found": _found(r"(\d+) of \d+ witnesses", printed),
        "wrong": 0,  # the first one ends the run with another exit status
    }


def read_fleet(printed: str) -> Figures:
    """Return faults, bytes that were read and right, and bytes that went between hosts."""
    counts = _last_object(printed)
    return {
        "faults": len(re.findall(r"(?m)^ *[\d.]+ s  ", printed)),
        "seconds": counts["seconds"],
        "slow_elsewhere": sum(int(n) for n in re.findall(r"elsewhere (\d+) gets", printed)),
        "verified_bytes": counts["blocks verified"] * GEOMETRY.block_bytes,
        "received_bytes": counts["peer_bytes_received"],
        "fetches": counts["peer_fetches_arrived"],
        "wrong": 0,  # the first one ends the run with another exit status
    }


def read_soak(printed: str) -> Figures:
    """Return the slopes of the second half, what was left in the end, and the times of reclaim."""
    found = _last_object(printed)
    slope = found["slope_per_hour"]
    return {
        "minutes": found["minutes"],
        "memory_mib_per_hour": slope["anonymous_mib"],
        "descriptors_per_hour": slope["num_descriptors"],
        "threads_per_hour": slope["num_threads"],
        "leases_per_hour": slope["num_leases"],
        "start_mib": found["before"]["anonymous_mib"],
        "highest_mib": found["highest_anonymous_mib"],
        "sessions": found["counts"]["sessions"],
        "verified_bytes": found["counts"]["blocks verified"] * GEOMETRY.block_bytes,
        "clients_killed": found["num_clients_killed"],
        "reclaim_p50_s": found["reclaim_s"]["p50"] or 0.0,
        "reclaim_p99_s": found["reclaim_s"]["p99"] or 0.0,
        "left": found["after"]["num_leases"] + found["after"]["num_clients"],
    }


def read_timing(printed: str) -> Figures:
    """Return the areas under the ROC curve: of what another tenant stored, and of the control."""
    figures: Figures = {"told": 0}
    for call, way, *areas in re.findall(
        r"(?m)^(get|put), (shared memory|gRPC) +([\d.]+) +([\d.]+) +([\d.]+)$", printed
    ):
        name = f"{call}_{'grpc' if way == 'gRPC' else 'memory'}"
        figures |= {f"{name}_none": float(areas[0]), f"{name}_other": float(areas[1])}
        figures |= {f"{name}_control": float(areas[2])}
    if len(figures) == 1:
        raise ValueError(f"no area was printed:\n{printed[-2000:]}")
    figures["told"] = printed.count("the clock tells")
    return figures


def read_overload(printed: str) -> Figures:
    """Return p99 of accepted calls at the usual load and at ten times that, and of refusals there; the same
    of a bare gRPC server."""
    lines = [line.split() for line in printed.splitlines()]
    rows = {line[0]: line for line in lines if len(line) == 15 and line[2].isdecimal()}
    if not {"1x", "10x", "floor-1x", "floor-10x"} <= rows.keys():
        raise ValueError(f"no load was measured:\n{printed[-2000:]}")
    return {
        "p99_1x_ms": float(rows["1x"][4]),
        "p99_10x_ms": float(rows["10x"][4]),
        "refused_p99_ms": float(rows["10x"][7]),
        "floor_p99_1x_ms": float(rows["floor-1x"][4]),
        "floor_p99_10x_ms": float(rows["floor-10x"][4]),
        "floor_refused_p99_ms": float(rows["floor-10x"][7]),
        "highest_mib": max(float(row[13]) for row in rows.values()),
        "recovery_ms": float(rows["10x"][14]),
        "cancelled": sum(float(row[9]) for load, row in rows.items() if not load.startswith("floor-")),
    }


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
    return " ".join(["python", *arguments])


def python() -> str:
    """Return the interpreter that rows are run with."""
    return str(Path(sys.executable))
