"""The daemon as a process: what signals mean, how it ends, what it asks of the interpreter and the kernel.

Apart from `daemon.py`, because a daemon may also live on an event loop inside another process (tests, demos),
which keeps its own signals and its own garbage collector.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

from ... import __version__
from ...tiers.block import Geometry
from ...tiers.memory.keeper import Keeper
from ..config import HostShare, Loaded, Settings, Tiers
from ..config.units import about_bytes
from ..errors import MemoryStartError, StartError
from ..observability.logs import configure
from ..tasks import Tasks, end
from .assembly import begin

if TYPE_CHECKING:
    from ..admin.admin_service import DrainResult
    from ..server.ports import AppliedPolicy
    from .daemon import Daemon

log = logging.getLogger(__name__)

DRAIN_GRACE_S = 10.0  # for a signal; Drain names its own
EXIT_FAILED, EXIT_CANNOT_START = 70, 78  # sysexits: EX_SOFTWARE, EX_CONFIG
EXIT_REFUSED = 2  # what the supervisor keeps memory for, and tries again after a pause
RESTART = 75  # EX_TEMPFAIL: what the supervisor starts another daemon for
#: Of KV: how quick codecs are for them is known soon after the start, before a block is stored.
USUAL_DTYPES = frozenset({"bfloat16", "float16"})
#: What the ready line counts in: a model that many know, in bfloat16. A token's K and V in all its layers.
MODEL_NAME = "Llama 3.1 8B"
TOKEN_BYTES = Geometry(
    num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=1, dtype="bfloat16"
).block_bytes
NVME_HINT = "--set tiers.nvme.path=/var/lib/kvtier --set tiers.nvme.capacity=100GiB"
COLLECTED_AFTER = (250, 1_000, 1_000_000)  # see tune_garbage_collector
_ENDING = (signal.SIGTERM, signal.SIGINT)
_PR_SET_DUMPABLE = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BYTES = 16 << 20  # freed memory of each arena that the kernel does not get back at once
_MAPPED_BYTES = 5 << 20  # what is longer gets pages of its own: more than a message of gRPC


def run(source: Settings | Loaded, keeper: Keeper | None = None) -> int:
    """Run the daemon as this process; return its exit code. With a `keeper`, memory outlives it."""
    configure((source.settings if isinstance(source, Loaded) else source).observe.log)
    # Another process of the same user could otherwise write our memory through /proc.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    keep_freed_memory()
    _raise_descriptor_limit()
    return asyncio.run(serve(source, keeper))


async def serve(source: Settings | Loaded, keeper: Keeper | None = None) -> int:
    """Run a daemon until a signal or a drain ends it; return the process's exit code.

    Prints one line when it is ready.
    """
    has_inherited = keeper is not None and bool(keeper.inherited)
    signals = Signals(asyncio.ensure_future(_start(source, keeper)))
    try:
        daemon = await signals.starting
    except StartError as problem:
        with contextlib.suppress(OSError):  # no reader
            print(f"Error: {problem}", file=sys.stderr)
        is_memory = isinstance(problem, MemoryStartError)
        return EXIT_REFUSED if has_inherited and not is_memory else EXIT_CANNOT_START
    except asyncio.CancelledError:
        if signals.num_endings > 1:
            return 0
        raise
    signals.apply(daemon)
    if daemon.codec_selection is not None:
        daemon.codec_selection.expect(USUAL_DTYPES)
    addresses = ", ".join(daemon.grpc.addresses)
    if keeper is not None:
        keeper.ready()
    try:
        print(f"kvtier {__version__} ready at {addresses}; {holding(daemon.settings.tiers)}", flush=True)
    except OSError:  # no reader, or a full disk: what is buffered must not fail again when this process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    daemon.appliance.failed.add_done_callback(lambda _: daemon.leaving.set())
    tune_garbage_collector()
    await daemon.leaving.wait()
    await signals.stop_draining()
    failed = daemon.appliance.failed.done()
    if failed:
        log.critical("the planner failed; ending", exc_info=daemon.appliance.failed.exception())
        if keeper is not None:
            keeper.is_handing_over = True  # the next daemon verifies what memory holds, as after a kill
    await daemon.stop()
    signals.close()
    log.info("ended")
    if failed:
        return EXIT_FAILED
    return RESTART if keeper is not None and keeper.is_handing_over else 0


async def _start(source: Settings | Loaded, keeper: Keeper | None) -> "Daemon":
    """Import what serves while the tiers are assembled: the cold store is read without the interpreter."""
    loaded = Loaded(source) if isinstance(source, Settings) else source
    assembling = begin(loaded.settings, keeper=keeper)
    from .daemon import Daemon

    return await Daemon.serve(loaded, assembling)


def holding(tiers: Tiers) -> str:
    """Return how many tokens of a known model the tiers hold, and how to hold more by default."""
    held = []
    for tier, size in tiers.sizes.items():
        num_tokens = size.capacity_bytes // TOKEN_BYTES
        held.append(f"{tier.label} {about_bytes(size.capacity_bytes)} ({num_tokens:,} tokens)")
    text = f"{', '.join(held)}; a token of {MODEL_NAME} is {about_bytes(TOKEN_BYTES)}"
    more = ["--set tiers.dram.capacity=50%"] if isinstance(tiers.dram.capacity_bytes, HostShare) else []
    more += [NVME_HINT] if tiers.nvme is None else []
    return f"{text}; for more: {' '.join(more)}" if more else text


class Signals:
    """SIGTERM and SIGINT drain the daemon, and end it at once when repeated; SIGHUP reads the policy again.

    Handled from the first moment: a signal's default is to kill. A signal to end that comes during the start
    is obeyed when it has started, since it may have acknowledged puts by then.
    """

    def __init__(self, starting: "asyncio.Future[Daemon]") -> None:
        self.starting = starting
        self.num_endings = 0
        self._daemon: Daemon | None = None
        self._draining: asyncio.Task[DrainResult] | None = None
        self._reloads: Tasks[AppliedPolicy | None] = Tasks()
        self._loop = asyncio.get_running_loop()
        for number in _ENDING:
            self._loop.add_signal_handler(number, self._end)
        self._loop.add_signal_handler(signal.SIGHUP, self._read_policy_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ENDING, signal.SIGHUP})  # the supervisor blocked them

    def apply(self, daemon: "Daemon") -> None:
        """Apply the signals that came during the start."""
        self._daemon = daemon
        if self.num_endings:
            self._drain(daemon)

    async def stop_draining(self) -> None:
        """End a drain that still waits for others."""
        await end([self._draining])

    def close(self) -> None:
        """Leave signals to Python again."""
        for number in (*_ENDING, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    def _end(self) -> None:
        self.num_endings += 1
        if self._daemon is None:
            if self.num_endings > 1:
                self.starting.cancel()
        elif self.num_endings > 1:
            self._daemon.leaving.set()
        else:
            self._drain(self._daemon)

    def _drain(self, daemon: "Daemon") -> None:
        self._draining = self._loop.create_task(daemon.drain(DRAIN_GRACE_S, leave=True))

    def _read_policy_again(self) -> None:
        if self._daemon is not None:  # else it is being read
            self._reloads.start(self._daemon.reload.from_file())


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed messages.

    A megabyte is a message of a stream: its pages went back to the kernel and came anew with every one, a
    third of what a streamed put took.
    """
    with contextlib.suppress(AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _raise_descriptor_limit() -> None:
    """Allow this process as many open files as it may have.

    Extents, segments and clients are descriptors; the usual soft limit, 1024, protects programs that call
    select(), and 64 GiB of nvme are beyond it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tune_garbage_collector() -> None:
    """Keep Python's collector away from what lives long.

    The catalog's objects have no cycles, yet with the default thresholds the collector walked them every
    second put: 0.6 of the 1.5 ms that a put of 64 blocks took. What is here now is exempt, the megabyte of
    cycles that imports leave with it (finding them would take 70 ms of the first get's time), young objects
    are looked at in small portions (2,000 took up to 8 ms beside others that use the memory), and the
    oldest generation, which takes long to walk and stops every thread, is left alone.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*COLLECTED_AFTER)
