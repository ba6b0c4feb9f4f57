"""Codec trials: how quickly a codec decodes on this host, measured on values like KV.

Loops of a codec that were never compiled here take ten seconds of a core to compile, much of it under the
interpreter's lock, and a thread that compiles cannot be ended: a daemon that was told to leave a second after
its first namespace waited 13 to 25 s for it. So another process compiles first, into numba's cache, with low
priority; it is killed when the daemon leaves, and dies with it. What is left for the daemon is to load the
result. Where there is no place for a cache, or no process can be started, the daemon compiles after all.
"""

import asyncio
import contextlib
import ctypes
import logging
import signal
import sys
import time
from collections.abc import Sequence

from ...tiers.codecs.base import Codec, CodecError, CodecMissing, DoesNotFit, Shape
from ...tiers.codecs.registry import codec_named
from ...tiers.codecs.streaming import note_loaded
from ...tiers.codecs.trial import trial_payload
from ...v1.threads import lower_thread_priority

log = logging.getLogger(__name__)

TRIAL_SHAPE = (4, 2, 64, 8, 128)  # layers, planes, tokens, heads, dim: a megabyte of bfloat16
NICENESS = 10
_PR_SET_PDEATHSIG = 1
#: -P: what lies in the directory the daemon was started in is not imported.
COMMAND = (sys.executable, "-P", "-m", "kvtier.appliance.compression.codec_trials")


async def compile_apart(trials: Sequence[tuple[str, str]]) -> None:
    """Compile what `decode_speed` needs for these names and dtypes, in another process.

    Cancelling it ends that process.
    """
    words = [word for name, dtype in trials if _accepts(name, dtype) for word in (name, dtype)]
    if words:
        await run_apart((*COMMAND, *words))


async def run_apart(command: Sequence[str]) -> None:
    """Run a command in a process that does not outlive the caller's interest. Its failure is none of ours."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
    )
    try:
        # A call cancelled while the process starts ends it below, like at any other time: asyncio, left to
        # it, kills what it started with a complaint.
        process = await asyncio.shield(starting)
        await process.wait()
    except OSError as problem:
        log.info("codecs are compiled in the daemon: %s", problem.strerror)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _end(await starting)
        raise


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def decode_speed(name: str, dtype: str) -> float:
    """Return the bytes of payload that one thread decodes in a second, of values like KV.

    0 when it cannot: its library is not installed (the checks before the start say so), or the values do not
    fit. Compiles what has to be.
    """
    if not _accepts(name, dtype):
        return 0.0
    codec, shape = codec_named(name), Shape(*TRIAL_SHAPE, dtype)
    payload = trial_payload(shape)
    stored, target = bytearray(codec.stored_bound(shape)), bytearray(shape.raw_bytes)
    try:
        codec.encode(shape, payload, memoryview(stored))
        took_s = min(_seconds_to_decode(codec, shape, stored, target) for _ in range(4))
    except CodecMissing:
        return 0.0
    except (CodecError, DoesNotFit) as problem:
        log.warning("codec %s is left out for %s: %s", name, dtype, problem or "values like KV do not fit")
        return 0.0
    note_loaded(codec.codec_id, dtype)
    return shape.raw_bytes / took_s


def _accepts(name: str, dtype: str) -> bool:
    return codec_named(name).accepts(Shape(*TRIAL_SHAPE, dtype))


def _seconds_to_decode(codec: Codec, shape: Shape, stored: bytearray, target: bytearray) -> float:
    began_at = time.perf_counter()
    codec.decode(shape, memoryview(stored), memoryview(target))
    return max(time.perf_counter() - began_at, 1e-9)


def main() -> None:
    """Compile codecs for dtypes, given in turns, in a process of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    lower_thread_priority("kvtier-compile", NICENESS)
    for name, dtype in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        decode_speed(name, dtype)


if __name__ == "__main__":
    main()
