"""What is done once per fragment, or to every byte, in C; `native` is None where it was not built.

    payload.copy_and_checksum      one pass instead of two over a payload that no cache holds
    SlotHeaders.fill_run           headers of a put's fragments in one call
    IndexWriter.insert_run         and their entries of the shared index
    sources/peers                  payloads of a ticket over a socket, with their hashes
    ResidenceWriter.set            where blocks are, for lookups without a call
    ResidenceReader.find           such a lookup
    OneSidedReader.read_run        a get without a call
    BlockTable                     rows of the catalog by name
    RingIo                         reads of files at the same time
    TransformSegment               transform coding, encode and decode

Each function has its twin in Python at the place that calls it, which is the reference: both run the same
contract tests, and without a compiler only speed is missing. KVTIER_NATIVE=off takes the twins.
Why C and not Cython, numba or more of mypyc: docs/decisions/0023-native.md.
"""

import importlib
import os
import platform
import sys
from collections.abc import Callable
from types import ModuleType

#: Whether this processor keeps stores in order, and loads: then Python, too, may read what is shared.
MEMORY_IS_ORDERED = platform.machine() in ("x86_64", "AMD64")


def _load() -> tuple[ModuleType | None, str]:
    """Return the module, or None and why it is not used."""
    if os.environ.get("KVTIER_NATIVE") == "off":
        return None, "KVTIER_NATIVE=off"
    if "t" in sys.abiflags:  # the lists that C walks are kept as they are by the interpreter's lock
        return None, "this Python is free-threaded"
    try:
        return importlib.import_module("._native", __name__), ""
    except ImportError as problem:
        return None, str(problem)


native, absence = _load()
#: Makes what was stored before visible before what is stored behind it. None where that needs no call, or
#: there is none.
order_stores: Callable[[], None] | None = (
    native.order_stores if native is not None and not MEMORY_IS_ORDERED else None
)
