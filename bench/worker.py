"""The side that runs beside a store: one adapter, driven by JSON lines on stdin, answering on stdout.

Every store (kvtier, a peer, plain memcpy) is driven by the same loop in a process of its own, with its own
interpreter, so that the parent can interleave them round by round and no store profits from another's
imports, threads or allocator. The clock is read here, around the one call that is measured: the pipe to the
parent costs nothing.

This module is executed by the peers' interpreters too: it may import the standard library and numpy, nothing
else.

Bytes are checked always. Every object carries a stamp in its first and last word, unique to it; each get
compares the stamps of all objects it fetched, outside the timed part, and the last get of a call compares
every byte.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_BATCH_BYTES = 128 * MIB

Words = npt.NDArray[np.uint64]
Answer = dict[str, Any]
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # makes stamps of neighbours differ in every byte


class Gone(RuntimeError):
    """What was prepared could not be got."""


class WrongBytes(Exception):
    """A store returned bytes that were not the ones put: the run is void."""


def quiet_stdout() -> Any:
    """Return a writer for answers and send everything else written to fd 1, also by C++, to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A server of ours. Dies with this process, even when this process is killed."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        libc = ctypes.CDLL(None)
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(env or {})},
                preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG
            )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Wait until `ready`. Raises RuntimeError, with the end of the log, at a timeout."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._process.args!r} did not come up:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


class Adapter(ABC):
    """One client of one store.

    `source` (what put sends), `plain` (the same in ordinary memory) and `dest` (where get writes) have the
    shape (num_planes, batch, words): object i of a chain is [:, i, :]. `select` sets and prefaults them.
    """

    forms: tuple[str, ...] = ("staging",)  # of put
    source: Words
    plain: Words
    dest: Words

    @abstractmethod
    def start(self, pool_bytes: int, spill: bool) -> str:
        """Start the store with `pool_bytes` of memory, connect to it and return its address.

        With `spill` it also gets a directory to spill to, if it can.
        """

    @abstractmethod
    def connect(self, address: str) -> None:
        """Connect to the store another worker has started."""

    @abstractmethod
    def select(self, size: int, batch: int) -> None:
        """Make ready for objects of `size` bytes, up to `batch` in one call."""

    @abstractmethod
    def names(self, chain: int, num: int) -> Any:
        """Return names of the first `num` objects of chain `chain`; built outside the timed part."""

    @abstractmethod
    def put(self, names: Any, form: str) -> int:
        """Store the first objects of `source` (or `plain`) and return how many the store acknowledged."""

    @abstractmethod
    def get(self, names: Any) -> int:
        """Get into `dest`; return how many objects arrived."""

    @abstractmethod
    def lookup(self, names: Any) -> int:
        """Return how many of the objects are there, without fetching them."""

    @abstractmethod
    def wipe(self) -> None:
        """Remove all that was put; the memory stays with the store."""

    @abstractmethod
    def stop(self) -> None:
        """Close the connection, and stop what `start` started."""

    def before_get(self, names: Any) -> None:
        """Run what the store needs before a get, which is not timed; most need nothing."""
        return

    def after_lookup(self, names: Any) -> None:
        """Release what a lookup took; not timed either."""
        return


class Worker:
    """Executes the parent's requests on one adapter. Each public method is one operation."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.num_chains_ever = os.getpid() << 20  # chains of two workers never meet
        self.chains: list[int] = []
        self.ready: list[Any] = []
        self.batch = 0
        self.cursor = 0
        self.pattern: Words

    def start(self, pool: int, spill: bool = False) -> Answer:
        return {"address": self.adapter.start(pool, spill), "forms": self.adapter.forms}

    def connect(self, address: str) -> Answer:
        self.adapter.connect(address)
        return {}

    def warm(self, bytes: int) -> Answer:
        """Write the store's memory once: the first touch of fresh memory is ten times slower than a copy."""
        self._select(32 * MIB, 1)
        for _ in range(bytes // (32 * MIB)):
            self._put(self._new_chain(), 1, "staging")
        self.adapter.wipe()
        return {}

    def prepare(self, size: int, batch: int, chains: int) -> Answer:
        """Remove everything, then put `chains` chains of `batch` objects and wait until all can be read."""
        self.adapter.wipe()
        self._select(size, batch)
        self.chains = [self._new_chain() for _ in range(chains)]
        for chain in self.chains:
            if self._put(chain, batch, "staging") != batch:
                raise RuntimeError(f"a put of {batch} x {size} bytes was refused while preparing")
        self.ready = [self.adapter.names(chain, batch) for chain in self.chains]
        for names in self.ready[-8:]:  # a get of any other that is not there yet fails loudly
            self._await_presence(names, batch)
        return {}

    def get(self, count: int) -> Answer:
        """Get `count` chains, in the order they were put, cycling. Raises WrongBytes."""
        latencies = [self._get_next() for _ in range(count)]
        self.adapter.dest[:] = 0
        self._get_next()
        for plane, expected in zip(self.adapter.dest, self.pattern, strict=True):
            if not (plane[: self.batch, 1:-1] == expected[1:-1]).all():
                raise WrongBytes("a get returned bytes that were not put")
        return {"ns": latencies}

    def put(self, count: int, form: str) -> Answer:
        """Put `count` chains under fresh names, time each, check that they are there, then forget them."""
        latencies: list[int] = []
        chains: list[int] = []
        for _ in range(count):
            chain = self._new_chain()
            names = self._stamp(chain, self.batch, form)
            began = time.perf_counter_ns()
            acknowledged = self.adapter.put(names, form)
            latencies.append(time.perf_counter_ns() - began)
            if acknowledged != self.batch:
                raise RuntimeError("a put was refused though the pool has room")
            chains.append(chain)
        for chain in chains[-3:]:
            self._await_presence(self.adapter.names(chain, self.batch), self.batch)
        self.adapter.wipe()
        return {"ns": latencies}

    def lookup(self, count: int, keys: int) -> Answer:
        """Run `count` lookups of `keys` objects of a prepared chain."""
        names = [self.adapter.names(chain, keys) for chain in self.chains]
        latencies: list[int] = []
        for i in range(count):
            which = names[i % len(names)]
            began = time.perf_counter_ns()
            found = self.adapter.lookup(which)
            latencies.append(time.perf_counter_ns() - began)
            self.adapter.after_lookup(which)
            if found != keys:
                raise RuntimeError(f"lookup found {found} of {keys} prepared objects")
        return {"ns": latencies}

    def probe(self, seconds: float, keys: int) -> Answer:
        """Run lookups of chains for `seconds`; only their times matter, not their answers."""
        names = [self.adapter.names(chain, keys) for chain in (self.chains or [1])]
        latencies: list[int] = []
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            which = names[len(latencies) % len(names)]
            began = time.perf_counter_ns()
            self.adapter.lookup(which)
            latencies.append(time.perf_counter_ns() - began)
            self.adapter.after_lookup(which)
        return {"ns": latencies}

    def fill(self, size: int, batch: int, objects: int) -> Answer:
        """Put `objects` objects; refusals do not matter, the pool is meant to be full afterwards."""
        self._select(size, batch)
        self.chains = [self._new_chain() for _ in range(objects // batch)]
        return {"acknowledged": sum(self._put(chain, batch, "staging") for chain in self.chains)}

    def flood(self, seconds: float, limit: int) -> Answer:
        """Put back to back for `seconds` or `limit` chains; afterwards count what is there, in any tier."""
        acknowledged: list[int] = []
        latencies: list[int] = []
        num_put = 0
        began = time.perf_counter()
        while num_put < limit and time.perf_counter() - began < seconds:
            chain = self._new_chain()
            names = self._stamp(chain, self.batch, "staging")
            at = time.perf_counter_ns()
            if self.adapter.put(names, "staging") == self.batch:
                acknowledged.append(chain)
            latencies.append(time.perf_counter_ns() - at)
            num_put += 1
        elapsed_s = time.perf_counter() - began
        self.chains = acknowledged
        return {"put": num_put, "acknowledged": len(acknowledged), "seconds": elapsed_s, "ns": latencies}

    def turns(self, size: int, batch: int, seconds: float) -> Answer:
        """Put a fresh chain and get it back, in turns, for `seconds`. Raises WrongBytes.

        `refused` counts puts that were not acknowledged, which are tried again after a millisecond under
        another name and counted in neither list; `lost` gets of what was acknowledged just before.
        """
        self._select(size, batch)
        puts: list[int] = []
        gets: list[int] = []
        refused = lost = 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            chain = self._new_chain()
            names = self._stamp(chain, batch, "staging")
            at = time.perf_counter_ns()
            if self.adapter.put(names, "staging") != batch:
                refused += 1
                time.sleep(0.001)
                continue
            puts.append(time.perf_counter_ns() - at)
            self.chains, self.ready, self.cursor = [chain], [names], 0
            try:
                gets.append(self._get_next())
            except Gone:
                lost += 1
        seconds = time.perf_counter() - began
        return {"put": puts, "get": gets, "refused": refused, "lost": lost, "seconds": seconds}

    def present(self) -> Answer:
        """Count the chains that the last flood saw acknowledged and that are still there."""
        num_present = 0
        for chain in self.chains:
            names = self.adapter.names(chain, self.batch)
            num_present += self.adapter.lookup(names) == self.batch
            self.adapter.after_lookup(names)
        return {"present": num_present}

    def _select(self, size: int, batch: int) -> None:
        assert size * batch <= MAX_BATCH_BYTES
        self.adapter.select(size, batch)
        self.batch = batch
        self.cursor = 0
        num_planes, _, num_words = self.adapter.source.shape
        random = np.random.default_rng(size)
        self.pattern = random.integers(0, 1 << 63, (num_planes, num_words), dtype=np.uint64)
        arrays = [self.adapter.source] + ([self.adapter.plain] if "plain" in self.adapter.forms else [])
        for array in arrays:
            array[:] = self.pattern[:, None, :]

    def _new_chain(self) -> int:
        self.num_chains_ever += 1
        return self.num_chains_ever

    def _stamps(self, chain: int, num: int) -> Words:
        return (np.arange(num, dtype=np.uint64) + np.uint64(chain << 10)) * SPREAD

    def _stamp(self, chain: int, num: int, form: str) -> Any:
        source = self.adapter.source if form == "staging" else self.adapter.plain
        source[0, :num, 0] = source[-1, :num, -1] = self._stamps(chain, num)
        return self.adapter.names(chain, num)

    def _put(self, chain: int, num: int, form: str) -> int:
        return self.adapter.put(self._stamp(chain, num, form), form)

    def _get_next(self) -> int:
        chain, names = self.chains[self.cursor], self.ready[self.cursor]
        self.cursor = (self.cursor + 1) % len(self.chains)
        self.adapter.before_get(names)
        began = time.perf_counter_ns()
        num = self.adapter.get(names)
        elapsed = time.perf_counter_ns() - began
        stamps, dest = self._stamps(chain, self.batch), self.adapter.dest
        if num != self.batch:
            raise Gone(f"a get returned {num} of {self.batch} prepared objects")
        first, last = dest[0, : self.batch, 0], dest[-1, : self.batch, -1]
        if not ((first == stamps).all() and (last == stamps).all()):
            raise WrongBytes("a get returned another object's bytes")
        return elapsed

    def _await_presence(self, names: Any, num: int) -> None:
        deadline = time.monotonic() + 10
        while True:
            found = self.adapter.lookup(names)
            self.adapter.after_lookup(names)
            if found == num:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{num} objects were acknowledged, {found} are there")
            time.sleep(0.001)


def work_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for a store's logs and sockets, removed when the worker ends."""
    return tempfile.TemporaryDirectory(prefix="kvtier-bench-", ignore_cleanup_errors=True)


def serve(adapter: Adapter) -> None:
    """Serve requests until stdin closes, then stop the store. Errors travel to the parent as text."""
    answers = quiet_stdout()
    worker = Worker(adapter)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            operation = getattr(worker, request.pop("op"))
            try:
                answer = operation(**request)
            except Exception as error:  # the parent decides; it raises what it reads here
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        adapter.stop()
