"""The parent's side: an engine in a process group of its own, so that all its workers go when it goes.

vLLM must not run in the process of the tests: it starts threads before it forks, keeps global state that a
second engine in the same process trips over, and a crash of the engine must be an answer, not the end of
the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.machine import ROOT
from bench.vllm import models
from bench.vllm.options import EngineOptions, environment_of

START_S = 300.0  # an engine takes 20 s on an idle machine, and much longer on a busy one
STOP_S = 30.0
Answer = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """One request's end. Times are of the monotonic clock, which all processes of a machine share."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens
    runners_up: tuple[float, ...]  # of the best other candidate
    num_cached: int
    num_preemptions: int
    added_at_s: float
    first_at_s: float
    last_at_s: float
    finish: str  # length | stop | aborted | error
    transfer: Any
    others: tuple[tuple[int, ...], ...] = ()  # tokens of further answers to the same prompt

    @property
    def ttft_s(self) -> float:
        return self.first_at_s - self.added_at_s


class EngineDied(RuntimeError):
    """The engine's process ended, or answered with an error."""


class EngineProcess:
    """An engine. Leaving the context kills whatever is left of it."""

    def __init__(
        self,
        options: EngineOptions,
        folder: Path,
        name: str = "engine",
        python: str = sys.executable,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it; `ready` waits. `folder` takes its options and its log.

        `python` is of the environment that has the engine; `prefix` is what its command begins with."""
        self.name = name
        self.options = options
        self.log = folder / f"{name}.log"
        settings = {**asdict(options), "model_path": str(models.path_of(options.model))}
        written = folder / f"{name}.json"
        written.write_text(json.dumps(settings))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*prefix, python, "-m", "bench.vllm.engine", str(written)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment_of(options),
                start_new_session=True,
            )
        self._unread = b""
        self.is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Self:
        if not self.is_ready:
            self.receive(START_S)
            self.is_ready = True
        return self

    def send(self, op: str, **arguments: Any) -> None:
        self.ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = 600.0) -> Answer:
        """Return the answer. Raises EngineDied with the end of the log."""
        answer: Answer = json.loads(self._line(timeout_s))
        if "error" in answer:
            raise EngineDied(f"{self.name}: {answer['error']}\n{self._tail()}")
        return answer

    def call(self, op: str, timeout_s: float = 600.0, **arguments: Any) -> Answer:
        self.send(op, **arguments)
        return self.receive(timeout_s)

    def generate(self, *requests: dict[str, Any], timeout_s: float = 600.0) -> list[Output]:
        """Run requests together; return their ends in the same order. See bench.vllm.engine."""
        return outputs_of(self.call("generate", requests=list(requests), timeout_s=timeout_s))

    def reset(self) -> None:
        """Reset the engine's own prefix cache: hits come from the connector afterwards."""
        self.call("reset")

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.call("metrics")["values"]
        return values

    def stop(self) -> None:
        """Ask it to leave in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()  # and whatever it left behind

    def kill(self) -> None:
        """Kill the engine and all its workers with SIGKILL."""
        self._clear()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _clear(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise EngineDied(f"{self.name}: no answer after {timeout_s:.0f} s\n{self._tail()}")
                got = os.read(self._process.stdout.fileno(), 1 << 16)
                if not got:
                    raise EngineDied(f"{self.name}: its process ended\n{self._tail()}")
                self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def outputs_of(answer: Answer) -> list[Output]:
    """Return the ends of the requests of a `generate`."""
    outputs = []
    for one in answer["requests"]:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in one.items()}
        outputs.append(Output(**values))
    return outputs
