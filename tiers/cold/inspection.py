"""Looking at a segment from outside: read-only, without the lock, beside a running owner or after one.

For the command line. It parses what is there with the store's own parsers and believes nothing else.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from ...v1.shm import PAGE_BYTES
from ..base import CopyError
from .direct_io import DirectIo
from .footer import Footer, FooterError, footer_bytes_for
from .manifest import IncompatibleFormat
from .manifest_file import load_manifest
from .recovery import SegmentFile, read_footer, scan
from .segment_files import segment_path


class ReadOnlyIo(DirectIo):
    """Opens nothing for writing and creates nothing. Through the page cache: any buffer will do."""

    def open(self, path: Path, *, direct: bool = True) -> int:
        """Open `path` for reading only."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def inspect_segment(directory: Path, number: int) -> dict[str, Any]:
    """Return what is known of segment `number`:
    `state` (free, unsealed, sealed, unknown), `epoch`, `footer` (valid, tombstone, or what is wrong),
    `num_records`, `payload_bytes`, `num_encrypted`, `owner_epoch`, `namespaces` (records by hex digest),
    `problems`.

    Raises FileNotFoundError when there is no such segment, ManifestDamaged never.
    """
    path = segment_path(directory, number)
    report: dict[str, Any] = {"segment": number, "file": str(path), "file_bytes": path.stat().st_size}
    try:
        state, damage = load_manifest(directory)
    except IncompatibleFormat as error:
        return report | {"state": "unknown", "problems": [str(error)]}
    problems = [f"{name}: {times}" for name, times in damage.items()]
    if state is None:
        return report | {"state": "unknown", "problems": [*problems, "no manifest can be read"]}
    life = state.lives.get(number)
    if life is None:
        return report | {"state": "free", "problems": problems}
    report |= {"state": "sealed" if life.sealed else "unsealed", "epoch": f"{life.epoch:016x}"}
    footer_bytes = footer_bytes_for(state.segment_bytes)
    data_pages = (state.segment_bytes - footer_bytes) // PAGE_BYTES
    io = ReadOnlyIo()
    fd = io.open(path)
    reasons: Counter[str] = Counter()
    try:
        file = SegmentFile(io, fd, number, life.epoch, data_pages, footer_bytes)
        footer, report["footer"] = _footer_or_scan(file, reasons)
    finally:
        io.close(fd)
    report["problems"] = problems + [f"{name}: {times}" for name, times in reasons.items()]
    if footer is not None:
        counts = Counter(footer.entries["namespace_index"].tolist())
        report |= {
            "num_records": len(footer.entries),
            "payload_bytes": int(footer.entries["stored_length"].sum()),
            "num_encrypted": int((footer.entries["key"] != 0).sum()),
            "owner_epoch": footer.owner_epoch,
            "namespaces": {footer.namespaces[index].hex(): times for index, times in sorted(counts.items())},
        }
    return report


def _footer_or_scan(file: SegmentFile, reasons: Counter[str]) -> tuple[Footer | None, str]:
    try:
        footer = read_footer(file)
        return footer, "valid" if footer else "tombstone"
    except (FooterError, CopyError) as error:
        return scan(file, reasons), str(error)
