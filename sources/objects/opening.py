"""Opens the store that an address names."""

from urllib.parse import urlsplit

from .pool import MooncakePool
from .store import ObjectStore, StoreLimits, check_address


def open_store(address: str, *, endpoint: str = "", limits: StoreLimits | None = None) -> ObjectStore:
    """Return the store at `address`; see ObjectStore. Raises StoreError."""
    check_address(address)
    if urlsplit(address).scheme == "mooncake":
        return MooncakePool(address, limits=limits)
    return ObjectStore(address, endpoint=endpoint, limits=limits)
