"""Reads the figures of each row out of what its command printed."""

import json
import re
from typing import Any

from tests.chaos.content import GEOMETRY
from tests.crash.daemon_loop import GEOMETRY as LOOP_GEOMETRY

Figures = dict[str, float]


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


def read_mends(printed: str) -> Figures:
    """Return what `read_pytest` does, and every figure that a test recorded: of several the largest."""
    counts = read_pytest(printed)
    for name, number in re.findall(r"(?m)^figure (\w+) ([-\d.e]+)$", printed):
        counts[name] = max(counts.get(name, float(number)), float(number))
    return counts


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
