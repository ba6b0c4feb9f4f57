"""`kvtier bench codec`: what each codec makes of KV on this host, one thread, against memcpy in the same run.

Without a file the values are normal ones, a scale for each layer's K and V: close to what models have, and
flattering to no codec. With one (`--file`, a .npy of bfloat16 bits as uint16, or of another two-byte type)
they are the user's own. Everything together is larger than the caches. What comes back is compared: a codec
that is fast and wrong says so.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table

from ...tiers.block import DTYPE_BYTES
from ...tiers.codecs.base import Codec, CodecError, DoesNotFit, Shape
from ...tiers.codecs.registry import BY_NAME
from ...tiers.codecs.trial import trial_payload
from .output import console, print_json
from .quantities import SIZE
from .target import Failed, json_option

ROUNDS = 5  # the best counts: a neighbour can only slow one down
BAR_CELLS = 24
Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CodecTimes:
    """One line of the result. Ratios are of raw to encoded bytes; speeds of raw bytes a second."""

    codec: str
    ratio: float
    share_fitting: float  # of the fragments, into the room that is reserved for them
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    encode_of_memcpy: float
    decode_of_memcpy: float


@click.command()
@click.option("--dtype", type=click.Choice(sorted(DTYPE_BYTES)), default="bfloat16", show_default=True)
@click.option("--fragment", default="1MiB", show_default=True, type=SIZE, help="Bytes encoded at a time.")
@click.option("--volume", default="64MiB", show_default=True, type=SIZE, help="Bytes in all.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Values, .npy.")
@json_option
def codec(dtype: str, fragment: int, volume: int, file: Path | None, as_json: bool) -> None:
    """Measure codecs on this host: ratio, encoding, decoding. Needs no daemon.

    \b
    Example:
      kvtier bench codec
      kvtier bench codec --dtype float16 --fragment 256KiB
    """
    try:
        fragments, shape = _values(dtype, fragment, volume, file)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    memcpy = _memcpy(fragments)
    speeds = [speed for make in BY_NAME.values() if (speed := measure(make(), fragments, shape, memcpy))]
    if as_json:
        print_json({"memcpy_bytes_per_s": memcpy, "codecs": [asdict(speed) for speed in speeds]})
    else:
        what = f"{len(fragments)} fragments of {shape.raw_bytes:,} bytes, {dtype}"
        title = f"{what}; memcpy {memcpy / 1e9:.1f} GB/s"
        console().print(_table(speeds, title))


def _values(
    dtype: str, fragment_bytes: int, volume_bytes: int, file: Path | None
) -> tuple[list[Array], Shape]:
    """Return payloads and their shape. Raises ValueError."""
    width = DTYPE_BYTES[dtype]
    num_values = fragment_bytes // width // 16 * 16
    if not num_values or volume_bytes < fragment_bytes:
        raise ValueError("--fragment is at least 16 values, --volume at least one fragment")
    shape = Shape(1, 2, 1, 1, num_values // 2, dtype)
    if file is None:
        count = volume_bytes // fragment_bytes
        return [np.frombuffer(trial_payload(shape, seed), np.uint8) for seed in range(count)], shape
    try:
        values = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file} is no .npy file of numbers; numpy.save writes one") from error
    if not isinstance(values, np.ndarray) or values.dtype.itemsize != width:
        raise ValueError(
            f"{file} does not hold values of {width} bytes, as {dtype} has; name another --dtype"
        )
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    count = raw.size // shape.raw_bytes
    if count == 0:
        raise ValueError(f"{file} holds less than one fragment; lower --fragment")
    return list(raw[: count * shape.raw_bytes].reshape(count, -1)), shape


def measure(codec: Codec, fragments: list[Array], shape: Shape, memcpy: float) -> CodecTimes | None:
    """Measure one codec; None when it does not take these values. Raises Failed on wrong bytes."""
    if not codec.accepts(shape):
        return None
    room = shape.raw_bytes + shape.raw_bytes // 64 + 4096  # for what grows, too
    stored = np.zeros((len(fragments), room), np.uint8)
    back = np.zeros(shape.raw_bytes, np.uint8)
    lengths: list[int] = []
    encode_s, decode_s = [], []
    for _ in range(ROUNDS):
        began_at = time.perf_counter()
        lengths = [_encode(codec, shape, one, into) for one, into in zip(fragments, stored, strict=True)]
        encode_s.append(time.perf_counter() - began_at)
        decode_s.append(
            sum(_decode(codec, shape, *item, back) for item in zip(stored, lengths, fragments, strict=True))
        )
    num_bytes = len(fragments) * shape.raw_bytes
    encode, decode = num_bytes / min(encode_s), num_bytes / max(min(decode_s), 1e-9)
    num_fitting = sum(0 < length <= codec.stored_bound(shape) for length in lengths)
    total = sum(length or shape.raw_bytes for length in lengths)
    share = num_fitting / len(fragments)
    return CodecTimes(codec.name, num_bytes / total, share, encode, decode, encode / memcpy, decode / memcpy)


def _encode(codec: Codec, shape: Shape, payload: Array, into: Array) -> int:
    try:
        return codec.encode(shape, payload.data, into.data)
    except DoesNotFit:
        return 0


def _decode(codec: Codec, shape: Shape, stored: Array, length: int, payload: Array, back: Array) -> float:
    """Return the seconds of decoding one fragment; what came back is compared off the clock."""
    if not length:
        return 0.0
    began_at = time.perf_counter()
    try:
        codec.decode(shape, stored.data[:length], back.data)
    except CodecError as error:
        raise Failed(f"{codec.name} cannot read what it wrote: {error}") from error
    seconds = time.perf_counter() - began_at
    if codec.exactness.is_exact and not np.array_equal(back, payload):
        raise Failed(f"{codec.name} gave back other bytes than it was given")
    return seconds


def _memcpy(fragments: list[Array]) -> float:
    """Return the bytes a second of copying every fragment to memory of its own."""
    target = np.ones((len(fragments), fragments[0].size), np.uint8)
    seconds = []
    for _ in range(ROUNDS):
        began_at = time.perf_counter()
        for source, into in zip(fragments, target, strict=True):
            np.copyto(into, source)
        seconds.append(time.perf_counter() - began_at)
    return target.nbytes / min(seconds)


def _table(speeds: list[CodecTimes], title: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("codec")
    for name in ("ratio", "fits", "encode GB/s", "decode GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("decoding, of memcpy", no_wrap=True)
    for speed in speeds:
        cells = round(min(speed.decode_of_memcpy, 1.0) * BAR_CELLS)
        row: list[Any] = [speed.codec, f"{speed.ratio:.3f}", f"{speed.share_fitting:.0%}"]
        row += [f"{speed.encode_bytes_per_s / 1e9:.2f}", f"{speed.decode_bytes_per_s / 1e9:.2f}"]
        table.add_row(*row, f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {speed.decode_of_memcpy:.0%}")
    return table
