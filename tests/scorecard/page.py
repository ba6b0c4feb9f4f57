"""The tables of docs/reliability.md, made from docs/data/reliability.json."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from .defects import DEFECTS
from .mends import MENDS
from .readers import Figures
from .record import ROOT, Entry, load, sums
from .rows import ROWS, Row

PAGE = ROOT / "docs" / "reliability.md"
NEVER = "never ran"
NO_FIGURES = "no figures yet"
LONG_COMMAND = 100  # characters; those of suites name every test
GIB = 1 << 30
SOAK_MINUTES = 60  # the latest run that was as long is shown


def scorecard_page() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/reliability.md with its tables."""
    entries = load()
    text = PAGE.read_text()
    for name, table in (
        ("scorecard", scorecard(entries)),
        ("runs", runs(entries)),
        ("defects", defects()),
        ("mends", mends(entries)),
    ):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    yield PAGE, text.encode()


def scorecard(entries: list[Entry]) -> str:
    """Return one line per row: what all runs together showed, and the last of them."""
    lines = [
        "| what | shown, all runs together | runs | last: commit, date | command |",
        "|---|---|---|---|---|",
    ]
    verified_bytes = sum(entry.figures.get("verified_bytes", 0.0) for entry in entries)
    shown = f"{verified_bytes / GIB:,.1f} GiB, none wrong"
    lines.append(f"| bytes read back and compared | {shown} | | | the rows below |")
    total = sums(entries)
    for row in ROWS:
        mine = [entry for entry in entries if entry.row == row.name and entry.figures]
        num_failed = sum(entry.has_failed for entry in entries if entry.row == row.name)
        command = mine[-1].command if mine else ""
        if not command or len(command) > LONG_COMMAND:
            command = f"python -m tests.scorecard --row '{row.name}'"
        last = f"{mine[-1].commit}, {mine[-1].date[:10]}" if mine else ""
        shown = SHOWN[row.name](total[row.name], mine) if mine else NO_FIGURES if num_failed else NEVER
        shown += f"; **{num_failed} failed, see below**" if num_failed else ""
        lines.append(
            f"| {row.what} | {shown}{_progress(row, total[row.name])} | {len(mine)} | {last} | `{command}` |"
        )
    return "\n".join(lines) + "\n"


def runs(entries: list[Entry]) -> str:
    """Return one line per run that failed or says something of itself; the others are in the file."""
    lines = [
        "| row | size | commit | date, UTC | seconds | machine | note |",
        "|---|---:|---|---|---:|---|---|",
    ]
    units = {row.name: row.unit for row in ROWS}
    lines += [
        f"| {one.row} | {one.size:,} {units[one.row]} | {one.commit} | {one.date} | {one.wall_s:,} | "
        f"{one.machine} | {one.note} |"
        for one in entries
        if one.note
    ]
    return "\n".join(lines) + "\n"


def defects() -> str:
    """Return one line per defect of others."""
    lines = ["| | reported as | what went wrong | fails here |", "|---:|---|---|---|"]
    for number, defect in enumerate(DEFECTS, 1):
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in defect.tests)
        lines.append(f"| {number} | {defect.threads} | {defect.what} | {tests} |")
    return "\n".join(lines) + "\n"


def mends(entries: list[Entry]) -> str:
    """Return one line per mend, with figures of the last run of the rows `mends` and `overload`."""
    last = {entry.row: entry for entry in entries if entry.figures and entry.row in ("mends", "overload")}
    figures: defaultdict[str, float] = defaultdict(lambda: math.nan)
    for entry in last.values():
        figures |= entry.figures
    lines = ["| | attack | what happens | fails without it |", "|---|---|---|---|"]
    for mend in MENDS:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in mend.tests)
        answer = mend.answer.format_map(figures)
        lines.append(f"| {mend.number} | {mend.attack} | {answer} | {tests} |")
    ran = [f"`{name}` on {one.commit}, {one.date}, {one.machine}" for name, one in sorted(last.items())]
    return "\n".join(lines) + f"\n\nFigures: {'; '.join(ran)}.\n" if ran else "\n".join(lines) + "\n"


def _progress(row: Row, figures: Figures) -> str:
    """Return how far the goal of a row is, empty when it has none or is reached."""
    if row.goal is None:
        return ""
    name, wanted = row.goal
    done = figures.get(name, 0.0)
    return "" if done >= wanted else f"; **{done / wanted:.1%} of the {wanted:,.0f} wanted**"


def _suite(figures: Figures, mine: list[Entry]) -> str:
    last = mine[-1].figures
    skipped = f", {last['skipped']:.0f} skipped here" if last["skipped"] else ""
    return f"{last['passed']:.0f} tests, {last['failed']:.0f} failed{skipped}"


def _kills(figures: Figures, mine: list[Entry]) -> str:
    return f"{figures['kills']:,.0f} kills, {figures['lost']:.0f} lost, none wrong"


def _soak(figures: Figures, mine: list[Entry]) -> str:
    right = [entry for entry in mine if not entry.has_failed]
    longest = max(entry.size for entry in right)
    last = [entry for entry in right if entry.size >= min(longest, SOAK_MINUTES)][-1].figures
    shown = (
        f"{last['minutes']:.0f} minutes, {last['sessions']:,.0f} sessions: anonymous memory from "
        f"{last['start_mib']:.0f} to at most {last['highest_mib']:.0f} MiB; in the second half "
        f"{last['memory_mib_per_hour']:+.1f} MiB, {last['descriptors_per_hour']:+.1f} descriptors, "
        f"{last['threads_per_hour']:+.1f} threads, {last['leases_per_hour']:+.1f} leases an hour"
    )
    if last.get("clients_killed"):
        shown += (
            f"; {last['clients_killed']:.0f} clients killed, their leases gone after "
            f"{last['reclaim_p50_s']:.2f} s (p99 {last['reclaim_p99_s']:.2f} s)"
        )
    return shown


def _overload(figures: Figures, mine: list[Entry]) -> str:
    last = mine[-1].figures
    shown = (
        f"p99 of accepted calls {last['p99_10x_ms']:.1f} ms, {last['p99_1x_ms']:.1f} at the usual load; of "
        f"refusals {last['refused_p99_ms']:.1f} ms"
    )
    if "floor_p99_10x_ms" in last:
        shown += (
            f" (a bare gRPC server in the same run: {last['floor_p99_10x_ms']:.1f}, "
            f"{last['floor_p99_1x_ms']:.1f}, {last['floor_refused_p99_ms']:.1f} ms)"
        )
    return (
        f"{shown}; {last['cancelled']:.0f} cancelled without a reason; "
        f"at most {last['highest_mib']:.0f} MiB; accepts {last['recovery_ms']:.0f} ms after the load"
    )


def _timing(figures: Figures, mine: list[Entry]) -> str:
    last = max(mine, key=lambda entry: entry.size).figures
    ways = sorted(name.removesuffix("_other") for name in last if name.endswith("_other"))
    return "; ".join(
        f"{way.replace('_', ' over ')} {last[way + '_other']:.3f} (control {last[way + '_control']:.3f})"
        for way in ways
    )


SHOWN: dict[str, Callable[[Figures, list[Entry]], str]] = {
    "seeds": lambda f, mine: (
        f"{f['seeds']:,.0f} seeds, {f['events']:,.0f} events, {f['faults']:,.0f} faults, "
        f"{f['violations']:.0f} violations, of seeds that pass now (next row)"
    ),
    "failed seeds": _suite,
    "mutants": lambda f, mine: f"all {mine[-1].figures['mutants']:.0f} killed",
    "store kills": _kills,
    "encrypted store kills": _kills,
    "overlay": _kills,
    "daemon kills": _kills,
    "kept memory kills": _kills,
    "kills by mode": _kills,
    "chaos": lambda f, mine: (
        f"{f['faults']:,.0f} faults, none wrong; {f['witnesses_found']:.0f} of {f['witnesses']:.0f} chains "
        "that were put right before a kill found after it"
    ),
    "fleet": lambda f, mine: (
        f"{f['faults']:,.0f} faults, none wrong, no call failed on a host that nothing was done to, where "
        f"{f['slow_elsewhere']:,.0f} gets took more than 2 s; {f['fetches']:,.0f} fetches, "
        f"{f['received_bytes'] / GIB:.1f} GiB between hosts"
    ),
    "soak": _soak,
    "overload": _overload,
    "timing": _timing,
    "field defects": _suite,
    "disk faults": _suite,
    "clock jumps": _suite,
    "hostile client": _suite,
    "hostile daemon": _suite,
    "hostile files": _suite,
    "mends": _suite,
}
