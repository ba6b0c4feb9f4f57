"""Codec speeds on disk beside the cold store: a restarted daemon knows at once what is worth its time.

`codec_speeds.json` in the directory of `tiers.nvme`, for one processor model and one version of kvtier; for
any other it is as if there were none. A speed that was kept is a beginning: it is measured again in the
background, and records tell more.

Beside the store, not beside what was compiled: that may be shared by daemons of other users, and numbers
that decide how bytes are stored must not come from another daemon.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from ... import __version__
from ...tiers.block import DTYPE_BYTES
from ...tiers.durable import write_whole
from .learned_file import read_whole

log = logging.getLogger(__name__)

Speeds: TypeAlias = dict[tuple[str, str], float]  # by dtype and codec name; bytes of payload a second

NAME = "codec_speeds.json"
MAX_BYTES = 1 << 16
FASTEST_BYTES_PER_S = 1e13  # nothing is


class SpeedFile:
    """Without a directory nothing is kept. Blocks."""

    def __init__(self, directory: Path | None, stamp: str = "") -> None:
        self._directory = directory
        self._stamp = stamp or f"kvtier {__version__} on {processor_model()}"

    def read(self, names: tuple[str, ...]) -> Speeds:
        """Return what was kept of these codecs; nothing when it is not understood."""
        data = b"" if self._directory is None else read_whole(self._directory / NAME, MAX_BYTES)
        try:
            kept = json.loads(data) if data else {}
            found = {
                (dtype, name): float(speed)
                for dtype, by_name in kept.get(self._stamp, {}).items()
                for name, speed in by_name.items()
            }
        except (ValueError, AttributeError, TypeError, RecursionError) as problem:
            log.warning("%s is not understood (%s); codecs are measured anew", NAME, type(problem).__name__)
            return {}
        return {
            (dtype, name): speed
            for (dtype, name), speed in found.items()
            if dtype in DTYPE_BYTES and name in names and 0 <= speed < FASTEST_BYTES_PER_S
        }

    def write(self, speeds: Mapping[tuple[str, str], float]) -> None:
        """Keep these. Logs what cannot be kept."""
        if self._directory is None:
            return
        by_dtype: dict[str, dict[str, float]] = {}
        for (dtype, name), speed in sorted(speeds.items()):
            by_dtype.setdefault(dtype, {})[name] = speed
        try:
            write_whole(self._directory / NAME, json.dumps({self._stamp: by_dtype}).encode())
        except OSError as problem:
            log.warning("cannot keep the speeds of codecs: %s", problem)


def processor_model() -> str:
    """Return what the kernel calls the processor; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    named = dict(line.partition(":")[::2] for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in named.items()}
    return " ".join(fields.get(key, "") for key in ("model name", "cpu family", "model", "stepping")).strip()
