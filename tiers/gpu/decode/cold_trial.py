"""Whether a device decodes quicker than the host, and a disk reads quicker into it: tried at start, not
believed.

A few megabytes of values like KV go both ways, in turn, and the results are compared bit for bit: encoded
over the link and decoded and hashed there, against decoded by the host's threads and sent raw. A way that is
not clearly quicker is not taken, and one that brings other bytes is an error in the log. For GPUDirect
Storage the same with a file in the cold store's directory. Never ran on a GPU.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import numpy as np

from ....v1.shm import PAGE_BYTES
from ...codecs.base import Codec, Shape
from ...codecs.exact.exponents import Exponents
from ...codecs.exact.float8 import Float8
from ...codecs.lossy.profile import Profile, uniform_rules
from ...codecs.lossy.profiled import Profiled
from ...codecs.trial import trial_payload
from ...payload import checksum
from ..device.contract import DeviceError, DeviceFault, DeviceMemory, Stream, pieces_of
from ..device.slabs import Slab
from ..device.waiting import copy_and_wait, wait_for
from .cold_edge import ColdCopier
from .decoding import DecodeItem
from .gds import OpenFile, Trial, compare
from .records import Record

log = logging.getLogger(__name__)

SHAPE = Shape(4, 2, 64, 8, 128, "bfloat16")  # a megabyte
FP8_SHAPE = Shape(4, 2, 128, 8, 128, "float8_e4m3fn")  # as large
NUM_FRAGMENTS = 8
FILE_BYTES = 8 << 20
FILE_NAME = "gds-trial"
HANG_S = 10.0


def trial_codecs() -> tuple[Codec, ...]:
    """Return a codec of each kind that a device decodes."""
    rules = uniform_rules(SHAPE.num_layers, SHAPE.num_planes, SHAPE.num_heads, "int", 4)
    profile = Profile(
        bytes(32), SHAPE.num_layers, SHAPE.num_heads, SHAPE.head_dim, SHAPE.num_planes, SHAPE.dtype, rules
    )
    return Exponents(), Float8(), Profiled(profile)


class ColdTrial:
    """Times both ways with the resources of an edge that is not in use yet. Not thread-safe.

    Raises DeviceError when there is nothing to try it with."""

    def __init__(self, copier: ColdCopier, helpers: Executor) -> None:
        self._decoding = copier.decoding
        self._helpers = helpers
        self._copier = copier
        self._device = copier.device
        self._stream: Stream = self._device.take_stream()
        chunks = [copier.chunks.take() for _ in range(2)]
        if None in chunks:
            raise DeviceError(DeviceFault.REFUSED, "no chunk is free to measure with")
        self._chunks: list[Slab] = [chunk for chunk in chunks if chunk is not None]
        self._num_fragments = min(NUM_FRAGMENTS, copier.chunks.shared_bytes // (2 * SHAPE.raw_bytes))
        self._file_bytes = min(FILE_BYTES, copier.chunks.shared_bytes)

    def close(self) -> None:
        """Give everything back."""
        self._device.give_stream(self._stream)
        for chunk in self._chunks:
            self._copier.chunks.give(chunk)

    def of_codec(self, codec: Codec) -> Trial:
        """Time both ways of decoding. Raises DeviceError, also when the device decodes to other bytes."""
        encoded, decoded = self._chunks
        shape = SHAPE if codec.accepts(SHAPE) else FP8_SHAPE
        stored_bytes = -(-codec.stored_bound(shape) // PAGE_BYTES) * PAGE_BYTES
        payload = trial_payload(shape)
        stored = [encoded.view[i * stored_bytes :][:stored_bytes] for i in range(self._num_fragments)]
        raw = [decoded.view[i * shape.raw_bytes :][: shape.raw_bytes] for i in range(self._num_fragments)]
        for into in stored:
            codec.encode(shape, payload, into)
        works = [
            DecodeItem(
                codec,
                shape,
                Record(encoded.device + i * stored_bytes, stored_bytes, decoded.device + i * shape.raw_bytes),
            )
            for i in range(self._num_fragments)
        ]
        found: list[bytes | None] = []

        def by_device() -> None:
            sent = (encoded.host, encoded.device, self._num_fragments * stored_bytes)
            self._stream.copy(pieces_of([sent]))
            digests = self._decoding.enqueue(self._stream, works)
            wait_for(self._device, self._stream, HANG_S)
            found.extend(digests())

        def by_host() -> None:
            list(self._helpers.map(partial(codec.decode, shape), stored, raw))
            self._copy(decoded, self._num_fragments * shape.raw_bytes)

        by_host()  # compiles the loops; and says what is right
        by_device()
        wanted = checksum(raw[0])
        return compare(by_device, by_host, lambda: all(digest == wanted for digest in found))

    def of_disk(self, directory: Path, open_file: OpenFile) -> Trial:
        """Time both ways of reading. Raises DeviceError, also when it brings other bytes, and OSError."""
        path, chunk = directory / FILE_NAME, self._chunks[0]
        content = np.random.default_rng(1).bytes(self._file_bytes)
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            os.fsync(descriptor)
            reader = open_file(path)

            def direct() -> None:
                reader.read(0, DeviceMemory(chunk.device, self._file_bytes))

            def bounce() -> None:
                if os.preadv(descriptor, [chunk.view[: self._file_bytes]], 0) != self._file_bytes:
                    raise OSError("the file of the trial is short")
                self._copy(chunk, self._file_bytes)

            def is_same() -> bool:
                direct()
                chunk.view[: self._file_bytes] = bytes(self._file_bytes)
                back = pieces_of([(chunk.device, chunk.host, self._file_bytes)])
                copy_and_wait(self._device, self._stream, back, HANG_S)
                return chunk.view[: self._file_bytes] == content

            trial = compare(direct, bounce, is_same)
            reader.close()
            return trial
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _copy(self, chunk: Slab, num_bytes: int) -> None:
        """Copy the beginning of a chunk to the device and wait. Raises DeviceError."""
        pieces = pieces_of([(chunk.host, chunk.device, num_bytes)])
        copy_and_wait(self._device, self._stream, pieces, HANG_S)


def quicker_codecs(
    copier: ColdCopier, helpers: Executor, disk: tuple[Path, OpenFile] | None = None
) -> frozenset[int]:
    """Return the codecs of which records go faster straight to the device.

    0 is among them where a `disk` (directory, what opens files) is given and GPUDirect Storage is quicker.
    `helpers` decode for the host. Blocks for some tenths of a second. What fails is left out, with a line in
    the log."""
    try:
        trial = ColdTrial(copier, helpers)
    except DeviceError as problem:
        log.warning("nvme to hbm was not tried: %s", problem)
        return frozenset()
    tried = {codec.codec_id: partial(trial.of_codec, codec) for codec in trial_codecs()}
    if disk is not None:
        tried[0] = partial(trial.of_disk, *disk)
    try:
        return frozenset(codec_id for codec_id, run in tried.items() if _is_quicker(codec_id, run))
    finally:
        trial.close()


def _is_quicker(codec_id: int, run: Callable[[], Trial]) -> bool:
    what = f"codec {codec_id}" if codec_id else "GPUDirect Storage"
    try:
        trial = run()
    except (DeviceError, OSError) as problem:
        log.warning("%s: %s; the way by dram stays", what, problem)
        return False
    log.info("%s: %.2f ms straight, %.2f ms by the host", what, trial.direct_s * 1e3, trial.bounce_s * 1e3)
    return trial.is_quicker
