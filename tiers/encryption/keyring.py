"""Keyring: the keys that a cold store's tenants are encrypted with, and the erasing of them.

    master keys    a file of the administrator's, never written by us (master_keys.py)
    data key       one per tenant, random; in `keys.json` beside the segments, wrapped with a master key
    erased         per tenant, the sequence number before which nothing of it may be believed any more

Destroying a data key makes everything unreadable that was written with it, wherever copies of the records
are, at the price of one small file. That file is replaced as a whole (new file, flush, rename, flush of the
directory), so a crash leaves the old one or the new one. A tenant that goes on writing gets another key.

Another master key is taken in the same way: all data keys are wrapped under it in one new file. Until the
rename the old wraps are there, and the administrator's file still holds what they need; so at every moment
the two files together open the store. Each wrap says which master key made it, for people: all are tried.

The mark of what was erased is for records from before there was encryption: no key of theirs can be
destroyed, but they must not come back either. It is read and obeyed even while encryption is switched off.

Rejected: keys derived from the master key and the tenant's name, because nothing could be destroyed then;
keys in the manifest, because its older half stays readable on purpose; wrapping anew under a master key while
the one before is missing, though a running daemon could: a file swapped by mistake would go unnoticed.
"""

import json
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...v1.files import read_regular_file
from ..base import Cause, CopyError
from ..durable import cause_of, write_whole
from .master_keys import KEY_BYTES, KeyringError, MasterKeys

FILE_NAME = "keys.json"
_FORMAT, _VERSION = "kvtier keys", 1
PLAIN = 0  # the key id of what is not encrypted
MAX_FILE_BYTES = 64 << 20
MAX_NAMED = 3  # tenants in a message


class DataKey(NamedTuple):
    """What the records of one tenant are encrypted with. `id` is never PLAIN."""

    id: int
    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.id:08x})"


class MasterKeyUse(NamedTuple):
    """What one master key is still needed for."""

    id: str
    is_current: bool
    num_wrapped: int  # data keys


class Keyring:
    """The key file of one cold store. Thread-safe. The owner of the directory owns it.

    Without `master_keys` nothing can be encrypted or decrypted; what was erased is known all the same.
    Raises KeyringError: the file is damaged, or a master key is missing that it was made with.
    """

    def __init__(self, directory: Path, master_keys: MasterKeys | None = None) -> None:
        self._path = directory / FILE_NAME
        self._masters = master_keys
        self._lock = threading.Lock()
        self._keys: dict[str, DataKey] = {}
        self._wrapped: dict[str, dict[str, Any]] = {}  # as in the file
        self._erased: dict[str, int] = {}
        self._barred: set[str] = set()  # tenants that get no new key for now
        self._load()

    @property
    def can_encrypt(self) -> bool:
        """Whether there is a master key."""
        return self._masters is not None

    def key_id(self, tenant: str) -> int:
        """Return the id of a tenant's present key; PLAIN when it has none that can be used."""
        key = self._keys.get(tenant)
        return key.id if key is not None else PLAIN

    def tenants(self) -> set[str]:
        """Return the tenants that have a key."""
        return set(self._keys)

    def key(self, tenant: str, key_id: int) -> DataKey | None:
        """Return a tenant's key of this id; None when it is gone."""
        key = self._keys.get(tenant)
        return key if key is not None and key.id == key_id else None

    def key_for_writing(self, tenant: str) -> DataKey:
        """Return the key to encrypt with, made and durable when this returns. Raises CopyError:
        NO_KEY while the tenant is being erased."""
        key = self._keys.get(tenant)
        if key is not None:
            return key
        with self._lock:
            if tenant in self._barred:
                raise CopyError(Cause.NO_KEY, "being erased")
            if (key := self._keys.get(tenant)) is None:
                taken = {other.id for other in self._keys.values()}
                key_id = next(n for n in iter(lambda: secrets.randbits(32), None) if n and n not in taken)
                key = DataKey(key_id, secrets.token_bytes(KEY_BYTES))
                assert self._masters is not None, "nothing is encrypted without a master key"
                self._replace({**self._wrapped, tenant: _wrap(tenant, key, self._masters)}, self._erased)
                self._keys[tenant] = key
        return key

    def trust(self, tenant: str) -> tuple[int, int]:
        """Return (key id, sequence number):
        recovery accepts a tenant's plain records and those of this key, from this sequence number on."""
        return self.key_id(tenant), self._erased.get(tenant, 0)

    def trust_of_file(self, tenant: str) -> tuple[int, int]:
        """Return what `trust` would return with the master keys, which this does not need."""
        return self._wrapped.get(tenant, {}).get("id", PLAIN), self._erased.get(tenant, 0)

    def erase(self, tenant: str, before: int) -> bool:
        """Destroy a tenant's key, durably when this returns.
        What has a sequence number lower than `before` stays gone whatever it was encrypted with. Returns
        whether there was a key. There will be another one after `admit`: until then plain bytes from before
        may still be on their way.

        Raises CopyError; the key is then still there, or gone after a restart. Trying again is right.
        """
        with self._lock:
            wrapped = {name: entry for name, entry in self._wrapped.items() if name != tenant}
            self._replace(wrapped, {**self._erased, tenant: before})
            self._barred.add(tenant)
            return self._keys.pop(tenant, None) is not None

    def admit(self, tenant: str) -> None:
        """Let an erased tenant have another key: nothing from before is on its way to the device any more."""
        with self._lock:
            self._barred.discard(tenant)

    # ------------------------------------------------------------------------------ master keys

    def take(self, master_keys: MasterKeys) -> int:
        """Use other master keys from now on; return how many data keys had to be wrapped anew.
        Every data key is wrapped under the first of them, durably when this returns.

        Raises KeyringError when none of them opens some data key; nothing has changed then. Raises CopyError
        when the key file could not be replaced; the keys from before are still needed then.
        """
        with self._lock:
            self._unwrap_all(self._wrapped, master_keys)
            wrapped = {
                tenant: entry
                if entry.get("master") == master_keys.current_id
                else _wrap(tenant, self._keys[tenant], master_keys)
                for tenant, entry in self._wrapped.items()
            }
            num_new = sum(entry is not self._wrapped[tenant] for tenant, entry in wrapped.items())
            if num_new:
                self._replace(wrapped, self._erased)
            self._masters = master_keys
            return num_new

    def check(self, master_keys: MasterKeys) -> None:
        """Raise KeyringError if `take` would. Changes nothing."""
        with self._lock:
            self._unwrap_all(self._wrapped, master_keys)

    def wrapped_by(self, tenant: str) -> str:
        """Return the id of the master key that a tenant's data key is wrapped with.
        Empty when it has none, or an older version wrapped it."""
        return str(self._wrapped.get(tenant, {}).get("master", ""))

    def master_key_uses(self) -> list[MasterKeyUse]:
        """Return the master keys there are, in the order of their file, and what each is needed for."""
        if (masters := self._masters) is None:
            return []
        counts = _count_wraps(self._wrapped)
        return [MasterKeyUse(name, name == masters.current_id, counts[name]) for name in masters.ids]

    # ---------------------------------------------------------------------------------- the file

    def _load(self) -> None:
        content = _read(self._path)
        self._wrapped, self._erased = content.wrapped, content.erased
        if self._masters is not None:
            self._keys = self._unwrap_all(content.wrapped, self._masters)

    def _unwrap_all(self, wrapped: Mapping[str, dict[str, Any]], masters: MasterKeys) -> dict[str, DataKey]:
        """Return the data keys in a file. Raises KeyringError, naming every master key that is missing."""
        found, closed = {}, []
        for tenant, entry in wrapped.items():
            opened = masters.unwrap(bytes.fromhex(entry["wrapped"]), _bound(tenant, entry["id"]))
            if opened is None:
                closed.append(tenant)
            else:
                found[tenant] = DataKey(entry["id"], opened[1])
        if closed:
            raise KeyringError(self._missing_keys_text(closed, wrapped, masters))
        return found

    def _missing_keys_text(
        self, tenants: list[str], wrapped: Mapping[str, dict[str, Any]], masters: MasterKeys
    ) -> str:
        named = ", ".join(tenant or "common:" for tenant in sorted(tenants)[:MAX_NAMED])
        more = f" and {len(tenants) - MAX_NAMED} more" if len(tenants) > MAX_NAMED else ""
        wanted = sorted({wrapped[tenant].get("master", "") for tenant in tenants} - {"", *masters.ids})
        held = f"encryption.master_key holds {', '.join(masters.ids)}"
        if wanted:
            missing = f"was made with another master key, {', '.join(wanted)}, and {held}"
            fix = "put its line back below the others and try again"
        else:
            missing = f"was made with another master key, or is damaged; {held}"
            fix = "put the line of the right one back, or restore the file"
        lost = f"nothing is lost until {FILE_NAME} is removed, which gives up what was encrypted"
        return f"{self._path} {missing} (needed by {named}{more}); {fix}; {lost}"

    def _replace(self, wrapped: Mapping[str, dict[str, Any]], erased: Mapping[str, int]) -> None:
        """Put another key file in the place of the one there is. Raises CopyError."""
        content = {"format": _FORMAT, "version": _VERSION, "keys": dict(wrapped), "erased": dict(erased)}
        try:
            write_whole(self._path, json.dumps(content, indent=1, sort_keys=True).encode())
        except OSError as error:
            raise CopyError(cause_of(error), f"{self._path}: {error.strerror}") from error
        self._wrapped, self._erased = dict(wrapped), dict(erased)


class _Content(NamedTuple):
    """A key file. Wraps are as in the file, with an `id` that is a number and a `wrapped` that is hex."""

    wrapped: dict[str, dict[str, Any]]
    erased: dict[str, int]


def count_wraps(directory: Path) -> Counter[str]:
    """Return how many data keys of a store each master key wraps, by id.
    Empty is one that an older version did not name. Needs no key, and no lock. Raises KeyringError."""
    return _count_wraps(_read(directory / FILE_NAME).wrapped)


def _count_wraps(wrapped: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    return Counter(str(entry.get("master", "")) for entry in wrapped.values())


def _read(path: Path) -> _Content:
    """Read a key file; one that is missing is empty. Raises KeyringError."""
    try:
        text = read_regular_file(path, MAX_FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        return _Content({}, {})
    except (OSError, UnicodeDecodeError) as error:
        raise KeyringError(f"{path} cannot be read ({error})") from error
    try:
        content = json.loads(text)
        if (content["format"], content["version"]) != (_FORMAT, _VERSION):
            raise KeyringError(f"{path} is of version {content['version']}; use the kvtier that wrote it")
        erased = {str(tenant): int(before) for tenant, before in content["erased"].items()}
        wrapped = {str(tenant): _checked(entry) for tenant, entry in content["keys"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KeyringError(
            f"{path} is damaged ({type(error).__name__}); restore it, or remove it: what was encrypted is "
            "then lost"
        ) from error
    return _Content(wrapped, erased)


def _checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrap that has what a wrap needs. Raises ValueError, KeyError, TypeError."""
    bytes.fromhex(entry["wrapped"])
    return {**entry, "id": int(entry["id"])}


def _wrap(tenant: str, key: DataKey, masters: MasterKeys) -> dict[str, Any]:
    wrapped = masters.wrap(key.secret, _bound(tenant, key.id)).hex()
    return {"id": key.id, "master": masters.current_id, "wrapped": wrapped}


def _bound(tenant: str, key_id: int) -> bytes:
    """Return what a wrapped key is bound to: moved to another tenant's name it is none."""
    return b"kvtier data key" + key_id.to_bytes(4, "big") + tenant.encode()
