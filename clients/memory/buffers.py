"""Memory of the caller as an address: ndarrays, tensors and anything with the buffer protocol.

Bytes are moved by memmove through ctypes because it releases the GIL, which memoryview slice assignment does
not, and because an address is the one thing that a bfloat16 tensor (which numpy cannot represent) and a
bytearray have in common. torch is recognised by `data_ptr`, never imported.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...v1.arguments import whole
from ..errors import InvalidRequest

copy_bytes = ctypes.memmove  # (target address, source address, number of bytes); releases the GIL
Addresses: TypeAlias = npt.NDArray[np.int64]
_BYTE = ctypes.c_char


class Span(NamedTuple):
    """Contiguous memory of the caller. `owner` keeps it alive and pinned while the span is in use."""

    address: int
    num_bytes: int
    owner: Any


def target_span(buffer: Any) -> Span:
    """Return the writable memory of `buffer`.

    Raises InvalidRequest when it is not contiguous, not writable, or not in host memory.
    """
    if type(buffer) is np.ndarray:
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise InvalidRequest("`into` must be writable and contiguous; use np.ascontiguousarray")
        if buffer.dtype.hasobject:
            raise _objects(buffer)
        if not buffer.nbytes:
            return Span(0, 0, buffer)
        return Span(_address_of_array(buffer), buffer.nbytes, buffer)
    if hasattr(buffer, "data_ptr"):
        return _tensor_span(buffer)
    view = _memoryview(buffer)
    if view.readonly:
        raise InvalidRequest("`into` is read-only; pass a bytearray, a writable array or a tensor")
    return _view_span(view, buffer)


def source_span(buffer: Any) -> Span:
    """Return the readable memory of `buffer`.

    Raises InvalidRequest when it is not contiguous or not in host memory.
    """
    if hasattr(buffer, "data_ptr"):
        return _tensor_span(buffer)
    array = getattr(buffer, "array", None)
    if isinstance(array, np.ndarray):  # a StagingBuffer
        buffer = array
    return _view_span(_memoryview(buffer), buffer)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Blocks that lie in pieces, e.g. a run of bytes per layer of a paged cache.

    `addresses` has shape (blocks, pieces): piece after piece they are the block, each `piece_bytes` long.
    `owner` keeps the memory alive. A get writes there and a put reads from there without another copy.
    Every fragment must be a whole number of pieces.
    """

    addresses: Addresses
    piece_bytes: int
    owner: Any = None


class Blocks:
    """Memory of the caller: one block behind the other from `address` on, or else at `addresses`."""

    __slots__ = ("_addresses", "_num_blocks", "address", "block_bytes", "owner")

    def __init__(self, num_blocks: int, block_bytes: int, owner: Any, where: int | Addresses) -> None:
        """`where`: the address of the first block, or of all pieces. `owner` keeps the memory alive."""
        self._num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.owner = owner
        self.address = where if isinstance(where, int) else None
        self._addresses = None if isinstance(where, int) else where

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def addresses(self) -> Addresses:
        """Where the pieces of blocks are, int64, shape (blocks, pieces)."""
        if self._addresses is None:
            starts = np.arange(self._num_blocks, dtype=np.int64) * self.block_bytes
            self._addresses = (starts + (self.address or 0))[:, None]
        return self._addresses

    @property
    def piece_bytes(self) -> int:
        """Bytes at each address."""
        return self.block_bytes // int(self.addresses.shape[1])

    def targets(self, fragment_offsets: Sequence[int], fragment_bytes: Sequence[int]) -> Addresses:
        """Return where fragments go, shape (blocks, groups, pieces of one fragment).

        Raises InvalidRequest when a fragment is not a whole number of pieces, or fragments differ in how many
        they are.
        """
        num_blocks, num_pieces = self.addresses.shape
        if num_pieces == 1:
            targets = self.addresses + np.array(fragment_offsets, np.int64)
            return targets[:, :, None]
        if len(set(fragment_bytes)) > 1 or fragment_bytes[0] % self.piece_bytes:
            raise InvalidRequest(
                f"fragments of {sorted(set(fragment_bytes))} bytes cannot be cut into pieces of "
                f"{self.piece_bytes}; choose layers_per_group so that it divides num_layers"
            )
        return self.addresses.reshape(num_blocks, len(fragment_bytes), -1)

    def part(self, first: int, last: int) -> "Blocks":
        """Return blocks `first` up to `last`."""
        where = (
            self.addresses[first:last] if self.address is None else self.address + first * self.block_bytes
        )
        return Blocks(min(last, self._num_blocks) - first, self.block_bytes, self.owner, where)

    def gather(self, address: int) -> None:
        """Copy all blocks to `address`, back to back. Releases the GIL."""
        if self.address is not None:
            copy_bytes(address, self.address, self._num_blocks * self.block_bytes)
            return
        piece_bytes = self.piece_bytes
        for source in self.addresses.ravel().tolist():
            copy_bytes(address, source, piece_bytes)
            address += piece_bytes


def blocks_of(data: Any, num_blocks: int, block_bytes: int, *, writable: bool) -> Blocks:
    """Return where blocks are. Raises InvalidRequest naming the sizes.

    `data` is one buffer that holds them back to back, a list or tuple of one buffer per block, or Pieces.
    """
    if isinstance(data, Pieces):
        return _blocks_in_pieces(data, num_blocks, block_bytes)
    span_of = target_span if writable else source_span
    if isinstance(data, list | tuple):
        if len(data) != num_blocks:
            raise InvalidRequest(f"{len(data)} buffers for {num_blocks} blocks; pass one per block")
        spans = [span_of(one) for one in data]
        for span in spans:
            if span.num_bytes != block_bytes:
                raise InvalidRequest(f"a buffer has {span.num_bytes} bytes, a block has {block_bytes}")
        addresses = np.array([span.address for span in spans], np.int64).reshape(-1, 1)
        return Blocks(num_blocks, block_bytes, [span.owner for span in spans], addresses)
    whole = span_of(data)
    wanted = num_blocks * block_bytes
    if whole.num_bytes < wanted or (not writable and whole.num_bytes != wanted):
        raise InvalidRequest(
            f"{num_blocks} blocks of {block_bytes} bytes are {wanted} bytes, the buffer has {whole.num_bytes}"
        )
    return Blocks(num_blocks, block_bytes, whole.owner, whole.address)


def scatter(targets: npt.NDArray[np.int64], length: int, offset: int, chunk: bytes) -> None:
    """Copy `chunk`, which begins at `offset` of a fragment of `length` bytes, to the fragment's pieces.

    `targets`: (pieces,) int64, their addresses.
    """
    piece_bytes = length // len(targets)
    done = 0
    while done < len(chunk):
        piece, start = divmod(offset + done, piece_bytes)
        num_bytes = min(piece_bytes - start, len(chunk) - done)
        part = chunk if num_bytes == len(chunk) else chunk[done : done + num_bytes]
        copy_bytes(int(targets[piece]) + start, part, num_bytes)
        done += num_bytes


def _blocks_in_pieces(pieces: Pieces, num_blocks: int, block_bytes: int) -> Blocks:
    addresses = pieces.addresses
    if not isinstance(addresses, np.ndarray) or (addresses.size and addresses.dtype.kind not in "iu"):
        raise InvalidRequest("addresses of Pieces must be an int64 array of shape (blocks, pieces)")
    addresses = addresses.astype(np.int64, copy=False)
    whole("piece_bytes", pieces.piece_bytes, 1)
    if addresses.ndim != 2 or len(addresses) != num_blocks:
        raise InvalidRequest(f"pieces of shape {addresses.shape} for {num_blocks} blocks; one row per block")
    if addresses.shape[1] * pieces.piece_bytes != block_bytes:
        raise InvalidRequest(
            f"{addresses.shape[1]} pieces of {pieces.piece_bytes} bytes a block, "
            f"a block has {block_bytes} bytes"
        )
    if (np.diff(addresses, axis=1) == pieces.piece_bytes).all():
        addresses = addresses[:, :1]  # the whole block in one run
    return Blocks(num_blocks, block_bytes, pieces.owner, addresses)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return where a contiguous array's bytes begin."""
    address: int = array.__array_interface__["data"][0]
    return address


def _address_of_array(array: Any) -> int:
    # Four times faster than __array_interface__; needs a writable array that is not empty.
    return ctypes.addressof(_BYTE.from_buffer(array))


def _memoryview(buffer: Any) -> memoryview:
    if isinstance(buffer, np.ndarray) and buffer.dtype.hasobject:
        raise _objects(buffer)
    if isinstance(buffer, np.ndarray) and buffer.flags.c_contiguous:
        buffer = buffer.reshape(-1).view(np.uint8)  # dtypes without a buffer format, e.g. ml_dtypes
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidRequest(
            f"{type(buffer).__name__} has no buffer; pass bytes, an ndarray, a tensor or a list of them"
        ) from None
    if not view.c_contiguous:
        raise InvalidRequest("the buffer must be contiguous; use np.ascontiguousarray or .contiguous()")
    return view


def _objects(array: np.ndarray[Any, Any]) -> InvalidRequest:
    return InvalidRequest(f"an array of {array.dtype} holds pointers, not bytes; convert it to numbers first")


def _view_span(view: memoryview, owner: Any) -> Span:
    if not view.nbytes:
        return Span(0, 0, owner)
    if not view.readonly:
        return Span(ctypes.addressof(_BYTE.from_buffer(view)), view.nbytes, view)
    return Span(address_of(np.frombuffer(view, np.uint8)), view.nbytes, view)


def _tensor_span(tensor: Any) -> Span:
    if tensor.device.type != "cpu":
        raise InvalidRequest(f"the tensor is on {tensor.device}; copy it to host memory with .cpu() first")
    if not tensor.is_contiguous():
        raise InvalidRequest("the tensor must be contiguous; use .contiguous()")
    if tensor.is_neg() or tensor.is_conj():  # its memory holds other values than it has
        raise InvalidRequest("the tensor is a negated or conjugated view; use .resolve_neg().resolve_conj()")
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
