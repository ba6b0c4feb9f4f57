"""The figures section of docs/benchmarks/gpu.md, from what came back from a GPU.

    python -m tests.gpu.report SUMMARY [SUMMARY ...] [--print]

Later summaries replace the steps that earlier ones have, so a step can be repeated alone. What no summary has
is listed as owed. A rehearsal's figures mean nothing and are printed only, never written to the page.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .steps import steps_of

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks/gpu.md"
BEGIN, END = "<!-- figures: python -m tests.gpu.report -->", "<!-- figures end -->"
OWED = "owed"
Steps = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table: what is wanted, the bar, the step that measures it, and how it is read."""

    name: str
    bar: str
    step: str
    read: Callable[[Any], str]


def _device(fragment: str, places: str) -> Callable[[Any], str]:
    def read(found: Any) -> str:
        row = next(row for row in found["rows"] if row[:2] == [fragment, places])
        return f"up {row[4]} ({row[2]} GB/s), down {row[5]} ({row[3]} GB/s)"

    return read


def _warm(found: Any) -> str:
    case = next(case for case in found["cases"] if case["case"] == "warm")
    get_s, torch_s = median(case["get"]["seconds"]), case["torch"]["median_s"]
    same = "same bytes" if case["get"]["is_same"] else "OTHER BYTES"
    return f"{torch_s / get_s:.2f} ({get_s * 1e3:.1f} ms, torch {torch_s * 1e3:.1f} ms; {same})"


def _first_layer(name: str) -> Callable[[Any], str]:
    def read(found: Any) -> str:
        part = next(case for case in found["cases"] if case["case"] == name)["layers"]
        first_s, last_s = part["seconds"][0], part["seconds"][-1]
        same = "same bytes" if part["is_same"] else "OTHER BYTES"
        return f"{first_s / last_s:.2f} ({first_s * 1e3:.1f} of {last_s * 1e3:.1f} ms; {same})"

    return read


def _tests(found: Any) -> str:
    bad = found["failures"] + found["errors"]
    passed = found["tests"] - bad - found["skipped"]
    return f"{passed} passed, {bad} failed, {found['skipped']} skipped"


def _trial(first: str) -> Callable[[Any], str]:
    def read(found: Any) -> str:
        rows = [row for row in found["trials"] if row[0].startswith(first)]
        return "; ".join(f"{row[0]}: {row[3] or 'not tried'} ({row[4]})" for row in rows)

    return read


def _crossovers(found: Any) -> str:
    words = []
    for way in dict.fromkeys(row["way"] for row in found["rows"]):
        quicker = [
            row["piece_bytes"]
            for row in found["rows"]
            if row["way"] == way and row.get("kernel_gb_per_s", 0.0) > row["batch_gb_per_s"]
        ]
        words.append(f"{way} {f'up to {max(quicker):,} bytes' if quicker else 'never'}")
    return ", ".join(words)


def _batches(found: Any) -> str:
    sound = [row for row in found["rows"] if row.get("exit_code") == 0]
    bad = [row for row in found["rows"] if row not in sound]
    words = [f"{row['pieces']:,}: {row['done_ms']:.2f} ms" for row in (sound[:1] + sound[-1:])]
    return "; ".join(words + [f"{row['pieces']:,}: {row.get('error', 'failed')[-80:]}" for row in bad])


def _killed(found: Any) -> str:
    names = ("others_after_s", "stuck_stream_ends_s", "close_s", "heartbeat_longest_s")
    return ", ".join(f"{name.removesuffix('_s').replace('_', ' ')}: {found[name]}" for name in names)


def _attributes(*names: str) -> Callable[[Any], str]:
    return lambda found: ", ".join(str(found.get(name, "not known")) for name in names)


def _exported(found: Any) -> str:
    return f"same bytes twice: {found['is_same_0'] and found['is_same_1']}"


def _edge(found: Any) -> str:
    return "; ".join(f"{row[0]} {row[1]}: {row[2]} GB/s of payload" for row in found["loads"])


def _sanitizer(found: Any) -> str:
    if found["errors"] is None:
        return "no summary was written"
    return f"{found['errors']} errors: {found['first'][0]}" if found["errors"] else "clean"


FIGURES = (
    Figure("device, driver", "", "attributes", _attributes("device", "driver")),
    Figure(
        "host pointers of registered memory, read-only registration",
        "1, none",
        "attributes",
        _attributes("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "READ_ONLY_HOST_REGISTER_SUPPORTED"),
    ),
    Figure("every kernel compiled and launched once", "all pass", "kernels-once", _tests),
    Figure("device contract, in one process", "all pass", "contracts", _tests),
    Figure("device contract, between two processes", "all pass", "across", _tests),
    Figure("torch tensor exported from a fresh thread, opened twice", "same bytes", "shared", _exported),
    Figure("hot tier", "all pass", "hbm", _tests),
    Figure("kernels copy, decode and hash, bit for bit", "all pass", "kernels", _tests),
    Figure("quantised records decode bit for bit", "all pass", "quantised", _tests),
    Figure("batch of copies in one call of the driver", "4,096 works", "batches", _batches),
    Figure("runtime killed before its event", "others and heartbeat live", "killed", _killed),
    Figure(
        "get of 4,096 tokens (Llama-3-8B) from the warm pool into another process's pages, of torch alone",
        "≥ 0.9",
        "pages-warm",
        _warm,
    ),
    Figure("nvme → dram → hbm: first layer of the last", "≤ 1/4", "pages-straight", _first_layer("by dram")),
    Figure(
        "nvme → hbm, straight: first layer of the last", "≤ 1/4", "pages-straight", _first_layer("straight")
    ),
    Figure("the kernel beats a batch of copies, by size of pieces", "none", "sweep", _crossovers),
    Figure(
        "pinned → hbm and back, fragments of 2 MiB, of the ceiling",
        "≥ 0.9",
        "device",
        _device("2 MiB", "neighbours"),
    ),
    Figure("the same, 64 KiB scattered over pages", "≥ 0.7", "device", _device("64 KiB", "scattered")),
    Figure("cold edge: what comes up is what the store holds", "all pass", "cold-tests", _tests),
    Figure("cold edge", "none", "cold", _edge),
    Figure(
        "encoded over the link, of decoded by the host", "1.05, or it stays off", "cold", _trial("decode")
    ),
    Figure("GPUDirect Storage, of the bounce", "1.05, or it stays off", "cold", _trial("GPUDirect")),
    Figure("piece kernel and digest under compute-sanitizer", "clean", "sanitizer", _sanitizer),
)


def merged(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the steps of all summaries by name. A later one counts, unless it did not run the step."""
    steps: dict[str, Mapping[str, Any]] = {}
    for summary in summaries:
        for step in summary["steps"]:
            if step["name"] not in steps or step["verdict"] in ("passed", "failed", "timed out"):
                steps[step["name"]] = step
    return steps


def value(figure: Figure, steps: Steps) -> str:
    """Return what a figure's cell says: its value, how its step failed, or that it is owed."""
    step = steps.get(figure.step)
    if step is None or step["verdict"] not in ("passed", "failed", "timed out"):
        return OWED + (f" ({step['verdict']})" if step is not None and step["verdict"] != OWED else "")
    failed = "" if step["verdict"] == "passed" else f"**{step['verdict']}: {step['reason']}** "
    if failed and step["figures"] is None:
        return failed.strip()
    try:
        return (failed + figure.read(step["figures"])).replace("|", "\\|").replace("\n", " ")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as problem:
        return f"{failed}**unreadable: {problem!r}**"


def rendered(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return the section: the table of figures, and how every step ended that has none."""
    steps = merged(summaries)
    rows = [(figure, value(figure, steps)) for figure in FIGURES]
    lines = ["| figure | bar | step | measured |", "|---|---|---|---|"]
    lines += [f"| {figure.name} | {figure.bar} | `{figure.step}` | {cell} |" for figure, cell in rows]
    num_owed = sum(cell.startswith(OWED) for _, cell in rows)
    lines += ["", f"{len(rows) - num_owed} of {len(rows)} figures are measured, {num_owed} are owed."]
    if bad := [step for step in steps.values() if step["verdict"] in ("failed", "timed out")]:
        lines += ["", "Failed: " + "; ".join(f"`{step['name']}` ({step['reason']})" for step in bad) + "."]
    return "\n".join(lines)


def write(text: str, page: Path = PAGE) -> None:
    """Put the section between its marks on `page`. Raises ValueError when it has none."""
    before, found, rest = page.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{page} has no lines {BEGIN} and {END} to write between")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.report", description="figures for the page")
    parser.add_argument(
        "summaries", type=Path, nargs="*", metavar="SUMMARY", help="summary.json; none: all owed"
    )
    parser.add_argument("--print", action="store_true", help="print the section, leave the page as it is")
    args = parser.parse_args(arguments)
    summaries = [json.loads(path.read_text()) for path in args.summaries]
    assert {figure.step for figure in FIGURES} <= {step.name for step in steps_of("cuda")}
    text = rendered(summaries)
    if any(summary["is_rehearsal"] for summary in summaries):
        print("a rehearsal on the fake device: these figures mean nothing and are not written\n")
        args.print = True
    if args.print:
        print(text)
    else:
        write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
