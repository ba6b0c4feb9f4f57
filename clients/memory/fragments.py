"""Fragments of a lease: their bytes in place, copies of them, and the check that nothing outlives the lease.

    fragment.copy()      uint8 array that belongs to the caller          fragment.copy(into=buffer)
    fragment.tensor()    torch tensor that belongs to the caller
    fragment.view        the daemon's own memory, read-only, until the lease ends

A view is released when its lease ends: using it raises ValueError instead of reading what the slot holds
next. What was made from a view cannot be released. numpy takes a second hold of the same buffer
(np.frombuffer, np.asarray, also a slice or a cast of the view); that shows here as memory that is still
referenced, and is an error at the end of the lease, because the alternative is bytes that change silently.
torch.frombuffer gives its hold of the buffer back at once and keeps the view object instead. That cannot be
told from a variable which still names the view, so it is a warning, where torch is loaded. The memory stays
mapped while a view object lives: such a tensor reads other bytes, and never takes the process down.
"""

import importlib
import sys
import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol

import numpy as np

from ..errors import InvalidRequest
from .buffers import address_of, copy_bytes, target_span
from .extents import U8


class Hold(Enum):
    """What refers to a fragment when its lease ends."""

    NONE = 0
    VIEW = 1  # the view object: a variable, or a tensor of torch.frombuffer
    MEMORY = 2  # an array, a slice, a cast: it reads on


class Readable:
    """The bytes of one fragment, and the view of them that callers have."""

    __slots__ = ("_memory", "_view")

    def __init__(self, memory: U8) -> None:
        """`memory` is an array object of this fragment alone, over memory that another object owns."""
        assert memory.base is not None
        self._memory: U8 | None = memory
        self._view: weakref.ref[memoryview] | None = None

    @property
    def num_bytes(self) -> int:
        """Length of the fragment."""
        assert self._memory is not None
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where the bytes are."""
        assert self._memory is not None
        return address_of(self._memory)

    def view(self) -> memoryview:
        """Return the bytes, read-only; the same object while it is referenced."""
        assert self._memory is not None
        view = self._view() if self._view is not None else None
        if view is None:
            view = self._memory.data.toreadonly()
            self._view = weakref.ref(view)
            keep_mapped = weakref.finalize(view, _nothing, self._memory.base)
            keep_mapped.atexit = False
        return view

    def end(self) -> Hold:
        """Release the view; return what still refers to the fragment. Once only."""
        assert self._memory is not None
        view = self._view() if self._view is not None else None
        hold = Hold.NONE
        if view is not None:
            hold = Hold.VIEW
            try:
                view.release()
            except BufferError:  # another library has this very buffer
                hold = Hold.MEMORY
        del view
        memory = weakref.ref(self._memory)
        self._memory = None
        return hold if memory() is None else Hold.MEMORY


class Source(Protocol):
    """What a fragment asks for its bytes: its lease."""

    def readable(self, block: int, group: int) -> Readable:
        """Return the bytes of a fragment. Raises NotFound when they have not arrived, or after the lease."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the elements' type."""
        ...


class Fragment:
    """One readable fragment of a lease: block `block` of the chain, layer group `group`."""

    __slots__ = ("_source", "block", "group")

    def __init__(self, block: int, group: int, source: Source) -> None:
        self.block = block
        self.group = group
        self._source = source

    @property
    def num_bytes(self) -> int:
        """Length in bytes. Raises NotFound when the lease has ended."""
        return self._source.readable(self.block, self.group).num_bytes

    @property
    def view(self) -> memoryview:
        """The bytes in place, read-only.

        Ends with the lease, and so must everything made from it: releasing the lease raises
        PreconditionFailed (VIEWS_IN_USE) otherwise. Raises NotFound when the lease has ended.
        """
        return self._source.readable(self.block, self.group).view()

    def copy(self, into: Any = None) -> Any:
        """Copy the bytes to `into`, a writable contiguous buffer, array or tensor; return it.

        None makes a uint8 array. The copy is the caller's own. Raises NotFound when the lease has ended,
        InvalidRequest.
        """
        readable = self._source.readable(self.block, self.group)
        into = np.empty(readable.num_bytes, np.uint8) if into is None else into
        target = target_span(into)
        if target.num_bytes < readable.num_bytes:
            raise InvalidRequest(
                f"the fragment has {readable.num_bytes} bytes, `into` has {target.num_bytes}; pass a longer "
                "buffer"
            )
        copy_bytes(target.address, readable.address, readable.num_bytes)
        return into

    def tensor(self, dtype: Any = None) -> Any:
        """Return a copy as a one-dimensional torch tensor on the CPU, by default of the namespace's dtype.

        Raises NotFound when the lease has ended, InvalidRequest without torch.
        """
        try:
            torch = importlib.import_module("torch")
        except ModuleNotFoundError:
            raise InvalidRequest("fragment.tensor() needs torch; use fragment.copy() without it") from None
        if not isinstance(dtype, torch.dtype | None):
            raise InvalidRequest(f"dtype must be one of torch's, is {type(dtype).__name__} {dtype!r}")
        made = self.copy(torch.empty(self.num_bytes, dtype=torch.uint8))
        return made.view(getattr(torch, self._source.dtype) if dtype is None else dtype)

    def __iter__(self) -> Iterator[Any]:
        """Unpack as block, group, view."""
        return iter((self.block, self.group, self.view))

    def __repr__(self) -> str:
        return f"<Fragment block={self.block} group={self.group}>"


def end_all(readables: dict[tuple[int, int], Readable]) -> tuple[str, str]:
    """End all fragments; return an error for those still read, a warning for those that may be.

    Both are texts, empty for none.
    """
    held: dict[Hold, list[tuple[int, int]]] = {hold: [] for hold in Hold}
    for place, readable in readables.items():
        held[readable.end()].append(place)
    readables.clear()
    problem = warning = ""
    if places := _places(held[Hold.MEMORY]):
        problem = (
            f"the lease has ended, and an array, tensor or slice made from {places} is still referenced: its "
            "bytes change from now on. `del` it inside the lease, or copy there: fragment.copy(), "
            "fragment.tensor()"
        )
    elif (places := _places(held[Hold.VIEW])) and "torch" in sys.modules:
        warning = (
            f"the lease has ended, and the view of {places} is still referenced. From a variable it cannot "
            "be read any more; a tensor that torch.frombuffer made from it reads other bytes from now on: "
            "use fragment.tensor()"
        )
    return problem, warning


def _places(held: list[tuple[int, int]]) -> str:
    """Return the names of some fragments, empty for none."""
    if not held:
        return ""
    some = ", ".join(f"({block}, {group})" for block, group in held[:4])
    return f"fragment{'s' * (len(held) > 1)} {some}{', ...' * (len(held) > 4)} (block, layer group)"


def _nothing(_: object) -> None:
    """What is called when a view is gone: until then its argument was referenced."""
