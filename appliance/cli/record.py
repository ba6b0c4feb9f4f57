"""`kvtier record`: record the requests of a daemon as a trace that identifies neither users nor prompts.

The file is made of gzip members, each of them whole: a disk that is full, or a recorder that is killed, costs
the last seconds of a recording and not all of it. (One stream that breaks off cannot be told from a copy that
is not complete, and is refused when it is read.)
"""

import gzip
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import click
import grpc

from ...tiers.block import Urgency
from ...v1 import events_pb2 as pb
from ...v1.conversions import URGENCIES
from ...v1.events_pb2_grpc import EventsServiceStub
from ...v1.shm import HASH_BYTES
from ..config.units import format_duration
from ..replay.recording import Recorder
from .output import talk
from .quantities import duration
from .target import Failed, connect, failure, resolve, target_option

#: Compression of the file: the least that still finds repeated prompts.
GZIP_LEVEL = 6
#: Text that is compressed together, and the longest that it waits for more.
MEMBER_CHARACTERS = 1 << 20
MEMBER_S = 10.0


class Members(io.TextIOBase):
    """Text that goes into a file as one gzip member after the other. Closes the file with itself."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._text = io.StringIO()
        self._num_bytes = 0  # of whole members
        self._began_at = time.monotonic()

    def write(self, text: str) -> int:
        """Add text. Raises OSError where the file cannot be written on; what was there before stays whole."""
        self._text.write(text)
        if self._text.tell() >= MEMBER_CHARACTERS or time.monotonic() - self._began_at >= MEMBER_S:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what waits. Raises OSError."""
        text, self._text = self._text.getvalue(), io.StringIO()
        self._began_at = time.monotonic()
        if not text or self.closed:
            return
        member = memoryview(gzip.compress(text.encode(), GZIP_LEVEL, mtime=0))
        try:
            while member:
                member = member[self._file.write(member) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._num_bytes)
            raise
        self._num_bytes = self._file.tell()

    def close(self) -> None:
        """Write the last member. Idempotent."""
        try:
            super().close()
        finally:
            self._file.close()


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option(
    "--for", "duration_s", type=duration(), help="Stop after this long, e.g. 1h.  [default: at Ctrl-C]"
)
@target_option
def record(out: Path, duration_s: float | None, target: str | None) -> None:
    """Record what a running daemon is asked for and given, until Ctrl-C, as a trace for `kvtier replay`.

    The file holds times, sizes, and names of blocks and sessions under a key that is never written down: it
    cannot be turned back into prompts, nor compared with another recording.

    \b
    Example:
      kvtier record --out monday.jsonl.gz --for 8h
      kvtier replay monday.jsonl.gz --policy lru --policy urgency --capacity 64GiB,128GiB
    """
    address = resolve(target)
    try:
        file = out.open("xb", buffering=0)
    except FileExistsError as error:
        raise Failed(f"{out} is there already; name another file") from error
    except OSError as error:
        raise Failed(f"cannot write {out}: {error.strerror}") from error
    text = Members(file)
    recorder = Recorder(text)
    try:
        with text, connect(address) as channel:
            is_over = _listen(channel, recorder, duration_s, address)
    except Failed:
        if recorder.num_accesses:
            _summary(recorder, out)
        else:
            out.unlink()  # the next try may have this name
        raise
    except OSError as error:
        raise Failed(
            f"{out} cannot be written on: {error.strerror}; what is in it can be replayed"
        ) from error
    _summary(recorder, out)
    if not is_over:
        talk().print("the daemon ended before that")


def _summary(recorder: Recorder, out: Path) -> None:
    lost = f", {recorder.num_lost:,} more were lost: too fast for this recorder" if recorder.num_lost else ""
    talk().print(f"{recorder.num_accesses:,} accesses in {out}{lost}")


def _listen(channel: grpc.Channel, recorder: Recorder, duration_s: float | None, address: str) -> bool:
    """Record until told to stop (True), or until the daemon ends."""
    call = EventsServiceStub(channel).WatchAccesses(pb.WatchAccessesRequest())

    def stop(number: int, frame: FrameType | None) -> None:
        call.cancel()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    timer = threading.Timer(duration_s, call.cancel) if duration_s is not None else None
    try:
        for message in call:
            if message.kind == pb.ACCESS_KIND_UNSPECIFIED:
                limit = f" for {format_duration(duration_s)}" if duration_s is not None else ""
                print(f"recording {address}{limit}", file=sys.stderr, flush=True)
                if timer is not None:
                    timer.start()
            else:
                take(recorder, message)
    except grpc.RpcError as error:
        if call.code() is not grpc.StatusCode.CANCELLED:
            raise failure(error, address) from error
        return True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if timer is not None:
            timer.cancel()
    return False


def take(recorder: Recorder, message: pb.WatchAccessesResponse) -> None:
    """Record one access."""
    if message.num_lost:
        recorder.lost(message.at_s, message.num_lost)
    if message.kind == pb.ACCESS_KIND_SESSION:
        word = message.session
        urgency = Urgency.ENDED if word.ended else URGENCIES[word.urgency]
        back_in_s = word.back_in_ms / 1000
        recorder.session(message.at_s, message.session_id, urgency, word.num_decoded_tokens, back_in_s)
        return
    recorder.namespace(message.namespace_id, message.block_tokens, message.block_bytes)
    packed = message.prefix_hashes
    blocks = [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]
    where = (message.at_s, message.namespace_id, message.session_id, message.parent_hash, blocks)
    if message.kind == pb.ACCESS_KIND_ASK:
        recorder.ask(*where, message.num_found)
    else:
        recorder.put(*where)
