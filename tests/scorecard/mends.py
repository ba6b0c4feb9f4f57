"""What attacks on kvtier find. `python -m tests.scorecard.mends`.

Each mend names the tests that hold it, and breaks: lines of the product that it consists of, taken out.
`python -m tests.scorecard.mends [NUMBER ...]` plants each break into a copy of the product and succeeds if
one of its tests fails there. The page's figures are what these tests recorded, and what `bench.overload`
measured, in the last run of the rows `mends` and `overload`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chaos.breaks import ROOT, Break, plant

from .mend import Mend
from .mends_of_callers import CALLERS
from .mends_of_sharing import SHARING
from .mends_of_state import STATE

MENDS = [*CALLERS, *STATE, *SHARING]


def mend_tests() -> list[str]:
    """Return every test of the list, each once."""
    return list(dict.fromkeys(test for mend in MENDS for test in mend.tests))


def is_seen(mend: Mend, old: str, new: str) -> str:
    """Run the tests of a mend on a copy of the product without it; return the last line of what failed.

    Raises AssertionError where none fails."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mend-") as name:
        source = plant(Break(mend.number, mend.file, old, new), Path(name))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-o", f"pythonpath={source} .", "-o", "timeout=60", *mend.tests]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 1, f"{mend.number} is not seen:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    return lines[-1] if lines else "failed"


def main() -> int:
    """Plant the breaks of the chosen mends, or of all; 0 when each is seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.scorecard.mends", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="of mends; all without one")
    numbers = parser.parse_args().numbers
    num_seen = num_missed = 0
    for mend in MENDS:
        for old, new in mend.breaks if not numbers or mend.number in numbers else ():
            try:
                print(f"{mend.number:3} {is_seen(mend, old, new)[:160]}", flush=True)
                num_seen += 1
            except AssertionError as problem:
                print(f"{mend.number:3} MISSED: {problem}", flush=True)
                num_missed += 1
    print(f"{num_seen} of {num_seen + num_missed} breaks were seen")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
