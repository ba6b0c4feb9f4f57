"""Opens the store that an address names."""

import os
from contextlib import suppress
from urllib.parse import urlsplit

from .pool import MooncakePool
from .store import ObjectStore, StoreLimits, check_address


def open_store(address: str, *, endpoint: str = "", limits: StoreLimits | None = None) -> ObjectStore:
    """Return the store at `address`; see ObjectStore. Raises StoreError."""
    check_address(address)
    if urlsplit(address).scheme == "mooncake":
        return MooncakePool(address, limits=limits)
    return ObjectStore(address, endpoint=endpoint, limits=limits)


def step_behind() -> None:
    """Let this thread, and those that it starts, take the processor from no thread that runs.

    Local calls beside exports took 12 % longer without that. The share of the processor stays the same. The
    client library starts its threads once in a process, at its first call."""
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
