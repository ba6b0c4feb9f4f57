"""Which weights made these bytes: a digest of a checkpoint on disk, cheap enough for every start of an
engine.

KV of one model is noise to another, and a name does not tell models apart: a folder is retrained in place,
a branch moves. So the namespace carries a digest of what is on disk. Reading 140 GB at every start was
rejected; names and sizes alone were rejected too, because a fine-tuned checkpoint has those of its base.
What is read instead:

    config*.json         all bytes, because rope scaling and the like change the KV
    *.safetensors        its header, and of every tensor SAMPLE_BYTES at its start, middle and end
    other weight files   size, and SAMPLE_BYTES at 64 places

A changed tensor would go unnoticed if all its samples were unchanged: training and merging change tensors
densely, so this takes a hand-made edit of single rows; `whole=True` reads everything where someone may make
such.

Format of safetensors files: https://huggingface.co/docs/safetensors/index. Cache of the hub:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from .errors import InvalidRequest

SAMPLE_BYTES = 4096
NUM_SAMPLES = 64  # of a weight file that is no safetensors file
MAX_HEADER_BYTES = 100 << 20  # that of the format
_TAG = b"kvtier.weights.1"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def find_checkpoint(
    model: str, revision: str | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder (or the single file) of `model`. Raises InvalidRequest when it is not there.

    It is a local path, or the snapshot of a hub model in the local cache. Reads the disk only.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    cache = _hub_cache(environment) / ("models--" + model.replace("/", "--"))
    reference = cache / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    snapshot = cache / "snapshots" / commit
    if commit and snapshot.is_dir():
        return snapshot
    raise InvalidRequest(
        f"the weights of {model!r} (revision {revision or 'main'}) are neither a local path nor in the cache "
        f"of the hub, {cache}; give their folder, or a digest",
        reason="BAD_NAMESPACE",
    )


def checkpoint_digest(path: Path, *, whole: bool = False) -> bytes:
    """Return 32 bytes that name the checkpoint in folder `path` (or the one file).

    Raises InvalidRequest when there are no weights; OSError when they cannot be read.

    The same checkpoint in another place, or under another name, has the same digest.
    """
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.suffix in _WEIGHTS]
    if not weights:
        raise InvalidRequest(
            f"no weights in {path} (looked for {', '.join(_WEIGHTS)}); give their folder, or a digest",
            reason="BAD_NAMESPACE",
        )
    hashed = hashlib.sha256(_TAG + bytes([whole]))
    for file in files:
        if file in weights:
            _add(hashed, file.name.encode())
            with file.open("rb") as opened:
                for piece in _pieces(opened, file, whole):
                    _add(hashed, piece)
        elif file.name.startswith("config") and file.suffix == ".json":
            _add(hashed, file.name.encode())
            _add(hashed, file.read_bytes())
    return hashed.digest()


def _pieces(opened: BufferedReader, file: Path, whole: bool) -> Iterator[bytes]:
    num_bytes = os.fstat(opened.fileno()).st_size
    yield num_bytes.to_bytes(8, "big")
    if whole:
        yield hashlib.file_digest(opened, "sha256").digest()
        return
    if file.suffix == ".safetensors":
        yield from _safetensors_pieces(opened, num_bytes, file)
        return
    step = max(1, (num_bytes - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
    for offset in range(0, num_bytes, max(step, SAMPLE_BYTES)):
        yield os.pread(opened.fileno(), SAMPLE_BYTES, offset)
    yield os.pread(opened.fileno(), SAMPLE_BYTES, max(0, num_bytes - SAMPLE_BYTES))


def _safetensors_pieces(opened: BufferedReader, num_bytes: int, file: Path) -> Iterator[bytes]:
    header_bytes = int.from_bytes(opened.read(8), "little")
    if not 0 < header_bytes <= min(MAX_HEADER_BYTES, num_bytes - 8):
        raise InvalidRequest(
            f"{file} is no safetensors file; is its download complete?", reason="BAD_NAMESPACE"
        )
    header = opened.read(header_bytes)
    yield header
    base = 8 + header_bytes
    for start, end in _spans(header, file):
        for offset in sorted({start, (start + end) // 2, max(start, end - SAMPLE_BYTES)}):
            yield os.pread(opened.fileno(), min(SAMPLE_BYTES, end - offset), base + offset)


def _spans(header: bytes, file: Path) -> list[tuple[int, int]]:
    """Return where the tensors are, relative to the end of the header."""
    try:
        entries: dict[str, Any] = json.loads(header)
        tensors = [entry for name, entry in entries.items() if name != "__metadata__"]
        return sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in tensors)
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        raise InvalidRequest(
            f"the header of {file} cannot be read ({problem}); is its download complete?",
            reason="BAD_NAMESPACE",
        ) from None


def _add(hashed: Any, piece: bytes) -> None:
    hashed.update(len(piece).to_bytes(8, "big"))
    hashed.update(piece)


def _hub_cache(environment: Mapping[str, str]) -> Path:
    if named := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    home = environment.get("HF_HOME") or environment.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface"
    return Path(home).expanduser() / "hub"
