"""Opening a cold store's directory: lock, manifest, geometry, files, in an order that can be undone.

What stands there may be ours, damaged, of another geometry, or of a version we do not know. Only the last
is not ours to touch: it is moved into a folder of its own, unread, and the store starts cold.
"""

import errno
import logging
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ...v1.shm import PAGE_BYTES
from ..base import ColdStoreError, CopyError
from ..encryption.keyring import Keyring
from ..encryption.master_keys import MasterKeys
from .buffered_io import BufferedIo
from .direct_io import DirectIo, direct_io, supports_direct
from .footer import footer_bytes_for
from .manifest import ENCRYPTED, IncompatibleFormat, ManifestState
from .manifest_file import Manifest, load_manifest
from .ownership import DirectoryLock, set_aside
from .segment_files import PATTERN, open_segment_files, remove_surplus

log = logging.getLogger(__name__)

Durability: TypeAlias = Literal["none", "segment", "record"]


class OpenedDirectory(NamedTuple):
    """What an open directory holds, and what ColdStore is made of."""

    directory: Path
    lock: DirectoryLock
    io: DirectIo
    manifest: Manifest
    fds: list[int]
    segment_bytes: int
    durability: Durability
    reasons: Counter[str]
    keyring: Keyring


def open_directory(
    directory: Path,
    segment_bytes: int,
    num_segments: int,
    durability: Durability,
    io: DirectIo | None,
    master_keys: MasterKeys | None,
) -> OpenedDirectory:
    """Open `directory` for one owner. Raises ColdStoreError; everything taken is then given back."""
    _check_sizes(segment_bytes, num_segments, durability)
    lock = DirectoryLock(directory)
    try:
        state, reasons = _load(directory)
        keyring = Keyring(directory, master_keys)  # of the owner only: another one may just have erased
        if master_keys is not None:
            _rewrap(keyring, master_keys)
            state.features |= ENCRYPTED
        _fit_geometry(state, segment_bytes, num_segments, reasons)
        io = io or _choose_io(directory)
        try:
            files = open_segment_files(directory, io, range(num_segments), segment_bytes)
        except ColdStoreError:
            io.shut_down()
            raise
        try:
            for number in files.missing & state.lives.keys():
                del state.lives[number]
                reasons["segment_missing"] += 1
            reasons["segment_resized"] += len(files.resized & state.lives.keys())
            manifest = Manifest(directory, io, state)
        except CopyError as error:
            for fd in files.fds:
                io.close(fd)
            io.shut_down()
            raise ColdStoreError(f"cannot write the manifest in {directory}: {error}; make room") from error
        remove_surplus(directory, num_segments)
    except OSError as error:
        lock.release()
        fix = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ColdStoreError(f"cannot open {directory}: {error}{fix}") from error
    except BaseException:
        lock.release()
        raise
    return OpenedDirectory(
        directory, lock, io, manifest, files.fds, segment_bytes, durability, +reasons, keyring
    )


def _rewrap(keyring: Keyring, master_keys: MasterKeys) -> None:
    """Wrap every data key under the master key in force. What it was wrapped with before is there as well, so
    a disk that is full is no reason not to start."""
    try:
        if num_new := keyring.take(master_keys):
            log.info("%d data keys are now wrapped with master key %s", num_new, master_keys.current_id)
    except CopyError as error:
        log.warning("older master keys are still needed: data keys could not be wrapped anew (%s)", error)


def _check_sizes(segment_bytes: int, num_segments: int, durability: str) -> None:
    if segment_bytes % PAGE_BYTES or segment_bytes - footer_bytes_for(segment_bytes) < 2 * PAGE_BYTES:
        raise ColdStoreError(
            f"segment_bytes must be a multiple of {PAGE_BYTES}, at least 32768, is {segment_bytes}"
        )
    if segment_bytes > 1 << 40:
        raise ColdStoreError(f"segment_bytes must be at most 1 TiB, is {segment_bytes}")
    if not 2 <= num_segments <= 1_000_000:
        raise ColdStoreError(f"num_segments must be 2 to 1000000, is {num_segments}")
    if durability not in ("none", "segment", "record"):
        raise ColdStoreError(f"durability must be none, segment or record, is {durability!r}")


def _load(directory: Path) -> tuple[ManifestState, Counter[str]]:
    try:
        state, reasons = load_manifest(directory)
    except IncompatibleFormat as error:
        target = set_aside(directory)
        log.warning("%s: %s; moved untouched to %s, starting cold", directory, error, target)
        return ManifestState(), Counter(incompatible_format=1)
    if state is None and not reasons and _holds_records(directory):
        reasons["manifest_missing"] += 1
    return state or ManifestState(), reasons


def _holds_records(directory: Path) -> bool:
    """Whether some segment file was ever written to: what a start that died has only preallocated is zero."""
    for path in directory.glob(PATTERN):
        with path.open("rb", buffering=0) as file:
            if any(file.read(PAGE_BYTES)):
                return True
    return False


def _fit_geometry(state: ManifestState, segment_bytes: int, num_segments: int, reasons: Counter[str]) -> None:
    """Drop the lives that do not fit the geometry asked for. The files follow."""
    if state.segment_bytes not in (0, segment_bytes):
        reasons["geometry_changed"] += len(state.lives)
        state.lives.clear()
    for number in [number for number in state.lives if number >= num_segments]:
        reasons["geometry_changed"] += 1
        del state.lives[number]
    state.segment_bytes, state.num_segments = segment_bytes, num_segments


def _choose_io(directory: Path) -> DirectIo:
    if supports_direct(directory):
        return direct_io()
    log.warning("%s does not support O_DIRECT: the cold store is served by aiofiles, slowly", directory)
    return BufferedIo()
