"""Names of objects, and the epoch folders that they expire with.

    v1/b/<epoch>/<tenant>/<namespace>/<name>    a bundle; <name>: prefix hash of its last block
    v1/k/<tenant>/<number>                      a tenant's data key, wrapped (fleet_keys.py)

Every part is of digits and lower-case hex, which no store rewrites. The epoch comes first, so that expiry and
listing are by prefix; the tenant comes before the namespace, so that erasing a tenant is one prefix an epoch
and a bucket policy can give a prefix away.

An epoch is a number of days and is named by its first day, `20261123`. The present one is written to, it and
the two before are read. An older one is dead: no host reads or lists it, so any host may delete it.
Rejected: the number of the epoch since 1970. Hosts with another number of days would share nothing, and
a listing would not say what is old.
"""

import hashlib
import re
from datetime import UTC, date, datetime, timedelta
from typing import Final, NamedTuple

BUNDLES: Final = "v1/b/"
TENANT_KEYS: Final = "v1/k/"
NUM_ALIVE: Final = 3  # epochs that are read: the present one and those before it
_FIRST_DAY = date(1970, 1, 1)
_TENANT_KEY = re.compile(r"v1/k/([0-9a-f]{32})/([0-9]{8}|[1-9][0-9]{8,255})")
_BUNDLE = re.compile(r"v1/b/(\d{8})/([0-9a-f]{32})/([0-9a-f]{64})/([0-9a-f]{64})")


class BundleKey(NamedTuple):
    """The parts of a bundle's key, as they stand in it."""

    epoch: str
    tenant: str  # tenant_folder()
    namespace: str  # digest, 64 hex digits
    name: str  # prefix hash of the bundle's last block, 64 hex digits

    def __str__(self) -> str:
        return f"{BUNDLES}{'/'.join(self)}"

    def in_epoch(self, epoch: str) -> "BundleKey":
        """Return the key of the same bundle in another epoch."""
        return self._replace(epoch=epoch)


class TenantKeyName(NamedTuple):
    """The parts of the key of an object that holds a wrapped data key. `number`: counts from 0."""

    tenant: str  # tenant_folder()
    number: int

    def __str__(self) -> str:
        return f"{TENANT_KEYS}{self.tenant}/{self.number:08d}"


def bundle_key(epoch: str, tenant: str, namespace_digest: bytes, name: bytes) -> BundleKey:
    """Return the key of the bundle that ends with block `name`, 32 bytes.
    `tenant` as in `tenant_of(domain)`."""
    return BundleKey(epoch, tenant_folder(tenant), namespace_digest.hex(), name.hex())


def parse_bundle_key(key: str) -> BundleKey | None:
    """Return the parts of a bundle's key; None for the key of anything else."""
    match = _BUNDLE.fullmatch(key)
    return BundleKey(*match.groups()) if match and _first_day(match[1]) is not None else None


def parse_tenant_key(key: str) -> TenantKeyName | None:
    """Return the parts of the key of a wrapped data key; None for the key of anything else."""
    match = _TENANT_KEY.fullmatch(key)
    return TenantKeyName(match[1], int(match[2])) if match else None


def tenant_folder(tenant: str) -> str:
    """Return the folder of a tenant, 32 hex digits of a hash of its name: names may hold any character."""
    return hashlib.sha256(b"kvtier tenant" + tenant.encode()).hexdigest()[:32]


class Epochs:
    """Epochs of `num_days` each, counted from 1970, by the store's clock; `is_endless`: one, the first.

    Raises ValueError unless `num_days` is 1 to 365.
    """

    def __init__(self, num_days: int, *, is_endless: bool = False) -> None:
        if not 1 <= num_days <= 365:
            raise ValueError(f"an epoch of {num_days} days; between 1 and 365 are possible")
        self.num_days = num_days
        self._is_endless = is_endless

    def present(self, now_s: float) -> str:
        """Return the folder that is written to at `now_s`, seconds since 1970."""
        return self.alive(now_s)[0]

    def alive(self, now_s: float) -> list[str]:
        """Return the folders that are read at `now_s`, newest first: NUM_ALIVE, or the only one."""
        if self._is_endless:
            return [f"{_FIRST_DAY:%Y%m%d}"]
        day = (datetime.fromtimestamp(now_s, UTC).date() - _FIRST_DAY).days
        first = day - day % self.num_days
        days = (first - back * self.num_days for back in range(NUM_ALIVE))
        return [f"{_FIRST_DAY + timedelta(days=one):%Y%m%d}" for one in days]

    def is_dead(self, epoch: str, now_s: float) -> bool:
        """Whether no host reads folder `epoch` any more. Names of another kind are never dead."""
        return _first_day(epoch) is not None and epoch < self.alive(now_s)[-1]


def _first_day(epoch: str) -> date | None:
    try:
        return datetime.strptime(epoch, "%Y%m%d").date()
    except ValueError:
        return None
