"""The contract of a codec: encodes the payload of one fragment to fewer bytes, and decodes it.

A codec is a pure function of bytes and *shape*: it knows what the numbers mean (layers, K and V, tokens,
heads) and nothing else. It keeps no state between fragments, because fragments are read in any order, after
any restart, by another process, and on another device. What it learned beforehand (an exponent table, bits
per head) is a value it was made with, and is named in the record.

How large the result can be is known before a byte is encoded (`stored_bound`): the planner reserves room
for it, and the planner cannot look at bytes. A codec with a result that depends on the data declares the size
it usually keeps and raises DoesNotFit beyond it; the fragment is then stored as it is. Reserving the raw size
and giving the rest back was rejected: in a log the rest is a hole.

Encoded bytes come from disk and from the network: a decoder believes no length in them, writes nowhere but
into `into`, fills it whole or raises, and needs no memory beyond a small multiple of the payload.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base import Buffer
from ..block import DTYPE_BYTES, Geometry

#: The one codec that may lose anything.
PROFILED_ID: Final = 5

KNOWN_LAYOUT = "layer,kv,token,head,dim"  # of which codecs know the axes


class CodecError(Exception):
    """These bytes are not what this codec writes for this shape. Never says more than where and why."""


class CodecMissing(CodecError):
    """A profile or a library that these bytes need is missing.

    As far as known they are whole, and can be read when it is back.
    """


class DoesNotFit(Exception):
    """The encoded payload is longer than its place: store it as it is."""


class Shape(NamedTuple):
    """Axes of the values of one fragment: [layer, plane, token, head, dim], row-major."""

    num_layers: int
    num_planes: int  # K and V; 1 for a joint latent
    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: str
    first_layer: int = 0  # which of the model's layers the first one is

    @property
    def raw_bytes(self) -> int:
        """Length of the payload."""
        return self.num_values * DTYPE_BYTES[self.dtype]

    @property
    def num_values(self) -> int:
        """Number of values in the payload."""
        return self.num_layers * self.num_planes * self.num_tokens * self.num_heads * self.head_dim


def shape_of(geometry: Geometry, group: int) -> Shape:
    """Return the shape of the fragments of layer group `group`.

    A layout that kvtier does not know is one row of values: codecs that need no axes still work on it.
    """
    num_layers = len(geometry.layers_of(group))
    if geometry.layout != KNOWN_LAYOUT:
        num_values = geometry.fragment_bytes[group] // DTYPE_BYTES[geometry.dtype]
        return Shape(1, 1, 1, 1, num_values, geometry.dtype)
    return Shape(
        num_layers,
        geometry.num_planes,
        geometry.block_tokens,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.dtype,
        geometry.layers_of(group).start,
    )


@dataclass(frozen=True, slots=True)
class Exactness:
    """Bound of the error of a decoded value. `is_exact`: no bit differs, NaN payloads included.

    Otherwise |decoded - raw| <= max_relative * (largest |raw| of the value's scale group) + max_absolute, for
    finite values; what is not finite makes the fragment be stored as it is.
    """

    is_exact: bool
    max_relative: float = 0.0
    max_absolute: float = 0.0


EXACT = Exactness(True)


class Codec(Protocol):
    """Encodes and decodes payloads of one fragment. Immutable, thread-safe; long calls release the GIL."""

    codec_id: int  # in the record; never reused for another meaning
    name: str  # in settings and metrics
    library: str  # module that it needs beside numpy; empty: none, and nothing is gained by it on a stream
    exactness: Exactness

    def parameters(self) -> bytes:
        """Return the bytes, at most 32, from which a reader makes this codec again.

        They stand in the record. Larger tables live in a profile; its digest is returned then.
        """
        ...

    def accepts(self, shape: Shape) -> bool:
        """Whether this codec can encode payloads of this shape at all."""
        ...

    def stored_bound(self, shape: Shape) -> int:
        """Return the bytes that `into` should have for `encode`. Depends on the shape only."""
        ...

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode `payload` (shape.raw_bytes long) into `into`; return the bytes written.

        `into` is usually stored_bound long. Raises DoesNotFit when it is too short.
        """
        ...

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Fill `into` (shape.raw_bytes long) from what `encode` wrote, whatever may follow it.

        A place is as long as its bound. Raises CodecError for bytes that `encode` never writes; `into` is
        then undefined.
        """
        ...


class ExactCodec:
    """What exact codecs share: a record describes itself, and takes a share of the raw size at most."""

    exactness = EXACT
    reserve = 1.0  # share of the raw size that `encode` may take
    head_bytes = 0  # before what is encoded

    def parameters(self) -> bytes:
        """Return b"": what is encoded describes itself."""
        return b""

    def accepts(self, shape: Shape) -> bool:
        """Return True: the values do not matter."""
        del shape
        return True

    def stored_bound(self, shape: Shape) -> int:
        """Return the bytes to reserve: the head, and `reserve` of the raw size."""
        return self.head_bytes + int(shape.raw_bytes * self.reserve)


def words_of(payload: Buffer) -> NDArray[np.uint16]:
    """Return a payload's words (n,) uint16, read-only; a copy when they are not aligned."""
    array = np.frombuffer(payload, np.uint16)
    words = array if array.flags.aligned else array.copy()
    words.flags.writeable = False
    return words


@cache
def loops_of(module: str) -> ModuleType:
    """Return a module of kernels/: compiled loops. Without numba raises CodecMissing, saying what to install.

    numba is imported with the first use: it takes half a second, and a daemon without compression should not
    pay it."""
    try:
        return import_module(f".kernels.{module}", __package__)
    except ImportError as error:
        raise CodecMissing(
            f"loops of {module} need numba ({error}); pip install 'kvtier[codecs]', "
            "or name codec planes and no profile"
        ) from error
