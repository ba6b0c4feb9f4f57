"""The parent's side: starts one worker process per store and speaks to it in JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.peers import is_installed, python_of

Answer = dict[str, Any]


class StoresDown(RuntimeError):
    """Stores did not start. `causes` maps the name of each to the reason its worker gave."""

    def __init__(self, causes: dict[str, str]) -> None:
        super().__init__("\n".join(f"{name} did not start: {cause}" for name, cause in causes.items()))
        self.causes = causes


class Seat:
    """One store in the round: `call` asks its worker, `send` and `receive` do so for several at once."""

    def __init__(self, name: str, peers: Path) -> None:
        self.name = name
        self.address = ""
        self.forms: list[str] = []
        python = str(python_of(peers, name)) if is_peer(name) else sys.executable
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the seat
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peer_{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        )

    @property
    def process_id(self) -> int:
        """The worker's; the processes of a store that it started are below it."""
        return self._process.pid

    def send(self, op: str, **arguments: Any) -> None:
        """Ask for an operation; `receive` reads the answer, or the errors of a worker that has died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)

    def receive(self) -> Answer:
        """Return the answer. Raises RuntimeError with the worker's own words when it failed or died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.name}'s worker died:\n{self._errors.read()[-3000:]}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def call(self, op: str, **arguments: Any) -> Answer:
        self.send(op, **arguments)
        return self.receive()

    def close(self) -> None:
        """Ask the worker to stop its store and leave; kill it when it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def is_peer(name: str) -> bool:
    return name not in ("memcpy", "kvtier")


def stores(peers: Path, wanted: list[str]) -> list[str]:
    """Return the stores of `wanted` that can run here, in the order of the round."""
    return [name for name in wanted if not is_peer(name) or is_installed(peers, name)]


@contextmanager
def seated(
    names: list[str], peers: Path, pool: int, spill: bool = False, warm: bool = True
) -> Iterator[list[Seat]]:
    """Start the stores at the same time, each with `pool` bytes of memory; stop them at the end.

    With `warm` all their pages have been touched. Raises StoresDown with all stores that did not start.
    """
    seats = [Seat(name, peers) for name in names]
    causes: dict[str, str] = {}
    try:
        for seat in seats:
            seat.send("start", pool=pool, spill=spill)
        for seat in seats:
            try:
                answer = seat.receive()
            except RuntimeError as error:
                causes[seat.name] = str(error)
            else:
                seat.address, seat.forms = answer["address"], answer["forms"]
        if causes:
            raise StoresDown(causes)
        if warm:
            for seat in seats:
                seat.send("warm", bytes=int(pool * 0.8))
            for seat in seats:
                seat.receive()
        yield seats
    finally:
        for seat in seats:
            seat.close()


@contextmanager
def second_client(seat: Seat, peers: Path) -> Iterator[Seat]:
    """Start another process connected to the same store."""
    other = Seat(seat.name, peers)
    try:
        other.call("connect", address=seat.address)
        yield other
    finally:
        other.close()
