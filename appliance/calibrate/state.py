"""What was measured, kept across runs: one line of JSON a measurement, behind a line that says of what.

Calibrating a large model takes hours; a run that was stopped goes on where it was. A file of another model,
text or set of options is refused rather than mixed in. Lines are appended and flushed one by one, and one
that was cut off by the end of the program is measured again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

VERSION = 2  # of the coders that losses are measured with


class StateError(Exception):
    """The file is of another run; the message says which part differs and what to do."""


class Measurements:
    """A dict of measurements by key that is also a file. Use as a context manager."""

    def __init__(self, path: Path, run: Mapping[str, str | int | float]) -> None:
        """Open `path`, made when it is not there. Raises StateError, and OSError."""
        self.known: dict[str, float] = {}
        header = {"kvtier_calibration": VERSION, **run}
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        if lines:
            self._check(path, lines[0], header)
            for line in lines[1:]:
                try:
                    key, value = json.loads(line)
                    self.known[str(key)] = float(value)
                except (ValueError, TypeError):
                    continue
        self._file: TextIO = path.open("a", encoding="utf-8")
        if not lines:
            self._write(header)
        else:
            self._file.write("\n")  # behind a line that was cut off; an empty one is skipped

    @staticmethod
    def _check(path: Path, line: str, header: Mapping[str, object]) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise StateError(f"{path} is no state of a calibration; name another --state")
        if differing := sorted(
            name for name in header.keys() | found.keys() if header.get(name) != found.get(name)
        ):
            raise StateError(
                f"{path} is of another calibration ({', '.join(differing)} differ); name another --state, or "
                "remove it to measure anew"
            )

    def keep(self, key: str, value: float) -> None:
        """Store a measurement; it is on disk when this returns."""
        self.known[key] = value
        self._write([key, value])

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def __enter__(self) -> "Measurements":
        return self

    def __exit__(self, *problem: object) -> None:
        self._file.close()
