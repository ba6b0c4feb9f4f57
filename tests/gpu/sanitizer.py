"""Runs a command under compute-sanitizer and says in figures what that found.

    python -m tests.gpu.sanitizer cuda|fake FILE COMMAND ...

compute-sanitizer marks its own lines with `=========` and ends with an `ERROR SUMMARY`. It returns what
`--error-exitcode` says where it found errors and the command did well, otherwise the command's exit code. A
command that never called the device proves nothing whatever its exit code is, so the summary must be there.
FILE gets {"errors": number, "first": lines of the first one}. Exit code 1: errors, or no summary; 77: the
latter in a rehearsal, which has no device.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from .first_contact import NEEDS_HARDWARE

FOUND = 9  # exit code of compute-sanitizer that found errors in a command that did well
MARK = "========="
SHOWN_LINES = 12
NOT_REACHED = "before first instrumented API call"
_SUMMARY = re.compile(rf"^{MARK} ERROR SUMMARY: (\d+) errors?", re.MULTILINE)


def parse(log: str) -> tuple[int | None, list[str]]:
    """Return the number of errors in a log, None without a summary, and the lines of the first error."""
    counts = [int(count) for count in _SUMMARY.findall(log)]
    marked = [line.removeprefix(MARK).strip() for line in log.splitlines() if line.startswith(MARK)]
    errors = [line for line in marked if line and not line.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY"))]
    return (sum(counts) if counts else None), errors[:SHOWN_LINES]


def main() -> int:
    kind, path, *command = sys.argv[1:]
    watched = ["compute-sanitizer", "--error-exitcode", str(FOUND), *command]
    done = subprocess.run(
        watched, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    print(done.stdout, flush=True)
    errors, first = parse(done.stdout)
    Path(path).write_text(json.dumps({"errors": errors, "first": first, "exit_code": done.returncode}))
    if errors is None:
        print(
            f"compute-sanitizer wrote no summary ({'; '.join(first) or 'nothing at all'}): nothing is shown"
        )
        return NEEDS_HARDWARE if kind == "fake" and NOT_REACHED in done.stdout else 1
    if errors:
        print(f"compute-sanitizer found {errors} errors, the first: {'; '.join(first)}")
    return int(errors > 0 or done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
