"""`python -m tests.scorecard [--scale 1] [--row NAME]`: run rows of the scorecard, add what they showed.

Each run is added to docs/data/reliability.json with its command, commit, machine and date, a failed one too,
and docs/reliability.md is written again. Scale 1 takes about 40 minutes on two cores; seeds, kills and
minutes add up over runs. The exit status is 1 when a row failed; its output says which seed to repeat.
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

from bench.machine import describe

from . import page, record
from .rows import ROWS, Row, arguments_of, as_typed, python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scorecard", description=__doc__)
    names = [row.name for row in ROWS]
    parser.add_argument("--scale", type=float, default=1.0, help="times the size of every row that has one")
    parser.add_argument("--row", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    arguments = parser.parse_args()
    chosen = [] if arguments.page else [row for row in ROWS if row.name in (arguments.row or names)]
    commit = describe({})["versions"].rpartition(" ")[2]  # before the first run changes a file
    failed = [row.name for row in chosen if not run(row, arguments.scale, commit)]
    for path, content in page.scorecard_page():
        path.write_bytes(content)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(row: Row, scale: float, commit: str) -> bool:
    """Run a row and add what it showed to this commit; False if it failed."""
    typed, size = arguments_of(row, scale, record.next_run(row.name, record.load()))
    machine = describe({})
    print(f"== {row.name}: {as_typed(typed)}", flush=True)
    began_at = time.monotonic()
    everything = {**os.environ, "RARE_MUTANTS": "1"}
    done = subprocess.run([python(), *typed], cwd=record.ROOT, env=everything, capture_output=True, text=True)
    wall_s = round(time.monotonic() - began_at)
    try:
        figures = row.read(done.stdout)
    except ValueError:
        figures = {}
    note = ""
    if done.returncode or not figures or figures[row.zero]:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        note = f"{record.FAILED}: exit status {done.returncode}, {' '.join(last)[:200]}"
        print(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    short = f"{machine['cpu'].partition(', last')[0]}, load {machine['load'].split()[0]}"
    record.add(record.Entry(row.name, size, as_typed(typed), commit, date, short, wall_s, figures, note))
    print(f"   {wall_s} s: {figures} {note}", flush=True)
    return not note


if __name__ == "__main__":
    sys.exit(main())
