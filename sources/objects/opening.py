"""Opens the store that an address names."""

from urllib.parse import urlsplit

from ...v1.threads import lower_thread_priority
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

    The share of the processor stays the same. The client library starts its threads once in a process, at its
    first call."""
    lower_thread_priority("kvtier-object", 0)
