"""Keyring: the keys that a cold store's tenants are encrypted with, and the erasing of them.

    master key     a file of the administrator's, 0600, never written by us
    data key       one per tenant, random; in `keys.json` beside the segments, wrapped with the master key
    erased         per tenant, the sequence number before which nothing of it may be believed any more

Destroying a data key makes everything unreadable that was written with it, wherever copies of the records
are, at the price of one small file. That file is replaced as a whole (new file, flush, rename, flush of the
directory), so a crash leaves the old one or the new one. A tenant that goes on writing gets another key.

The mark of what was erased is for records from before there was encryption: no key of theirs can be
destroyed, but they must not come back either. It is read and obeyed even while encryption is switched off.

Rejected: keys derived from the master key and the tenant's name, because nothing could be destroyed then;
keys in the manifest, whose older half stays readable on purpose.
"""

import json
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .base import Cause, CopyError
from .direct import cause_of, sync_directory
from .ownership import ColdStoreError

KEY_BYTES = 32
FILE_NAME = "keys.json"
_NEW_NAME = "keys.json.new"
_FORMAT, _VERSION = "kvtier keys", 1
_NONCE_BYTES = 12
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
PLAIN = 0  # the key id of what is not encrypted


class KeyringError(ColdStoreError):
    """The keys cannot be used. The message names the file and the fix."""


class DataKey(NamedTuple):
    """What the records of one tenant are encrypted with. `id` is never PLAIN."""

    id: int
    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.id:08x})"


def read_master_key(path: Path) -> bytes:
    """Return the 32 bytes that a master key file says, in hex. Raises KeyringError: it is missing, somebody
    else could read it, or it holds something else."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(1024).decode("ascii", "replace").strip()
    except OSError as error:
        raise KeyringError(
            f"encryption.master_key: {path}: {error.strerror}; make one with "
            f"`(umask 077; openssl rand -hex 32 > {path})`"
        ) from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyringError(
            f"encryption.master_key: {path} has mode {stat.S_IMODE(status.st_mode):04o}, others could read "
            f"it; `chmod 600 {path}`"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise KeyringError(
            f"encryption.master_key: {path} belongs to user {status.st_uid}; give it to user {os.geteuid()}"
        )
    if _HEX_KEY.fullmatch(text) is None:
        raise KeyringError(f"encryption.master_key: {path} must hold 64 hex digits; `openssl rand -hex 32`")
    return bytes.fromhex(text)


class Keyring:
    """The key file of one cold store. Thread-safe. Whoever owns the directory owns it.

    Without a `master_key` nothing can be encrypted or decrypted; what was erased is known all the same.
    Raises KeyringError: the file is damaged, or was made with another master key.
    """

    def __init__(self, directory: Path, master_key: bytes | None = None) -> None:
        self._path = directory / FILE_NAME
        self._wrapping = _aead(master_key) if master_key is not None else None
        self._lock = threading.Lock()
        self._keys: dict[str, DataKey] = {}
        self._wrapped: dict[str, dict[str, Any]] = {}  # as in the file
        self._erased: dict[str, int] = {}
        self._barred: set[str] = set()  # tenants that get no new key for now
        self._load()

    @property
    def can_encrypt(self) -> bool:
        """Whether there is a master key."""
        return self._wrapping is not None

    def key_id(self, tenant: str) -> int:
        """Return the id of a tenant's present key; PLAIN when it has none that can be used."""
        key = self._keys.get(tenant)
        return key.id if key is not None else PLAIN

    def tenants(self) -> set[str]:
        """Return who has a key."""
        return set(self._keys)

    def key(self, tenant: str, key_id: int) -> DataKey | None:
        """Return a tenant's key of this id; None when it is gone."""
        key = self._keys.get(tenant)
        return key if key is not None and key.id == key_id else None

    def key_for_writing(self, tenant: str) -> DataKey:
        """Return the key to encrypt with, made and durable when this returns. Raises CopyError: NO_KEY while
        the tenant is being erased."""
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
                self._replace({**self._wrapped, tenant: self._wrap(tenant, key)}, self._erased)
                self._keys[tenant] = key
        return key

    def trust(self, tenant: str) -> tuple[int, int]:
        """Return which records of a tenant are to be believed at recovery: plain ones and those of this key,
        from this sequence number on."""
        return self.key_id(tenant), self._erased.get(tenant, 0)

    def erase(self, tenant: str, before: int) -> bool:
        """Destroy a tenant's key, durably when this returns; what has a sequence number lower than `before`
        stays gone whatever it was encrypted with. Returns whether there was a key. There will be another one
        after `admit`: until then somebody may still hold plain bytes from before.

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

    # ---------------------------------------------------------------------------------- the file

    def _load(self) -> None:
        try:
            text = self._path.read_text("utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise KeyringError(f"{self._path} cannot be read ({error})") from error
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise KeyringError(
                    f"{self._path} is of version {content['version']}; use the kvtier that wrote it"
                )
            self._erased = {str(tenant): int(before) for tenant, before in content["erased"].items()}
            self._wrapped = {str(tenant): dict(entry) for tenant, entry in content["keys"].items()}
            if self._wrapping is not None:
                self._keys = {tenant: self._unwrap(tenant, entry) for tenant, entry in self._wrapped.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KeyringError(
                f"{self._path} is damaged ({type(error).__name__}); restore it, or remove it: what was "
                "encrypted is then lost"
            ) from error

    def _replace(self, wrapped: Mapping[str, dict[str, Any]], erased: Mapping[str, int]) -> None:
        """Put another key file in the place of the one there is. Raises CopyError."""
        content = {"format": _FORMAT, "version": _VERSION, "keys": dict(wrapped), "erased": dict(erased)}
        new = self._path.with_name(_NEW_NAME)
        try:
            new.unlink(missing_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            raise CopyError(cause_of(error), f"key file: {error.strerror}") from error
        self._wrapped, self._erased = dict(wrapped), dict(erased)

    def _wrap(self, tenant: str, key: DataKey) -> dict[str, Any]:
        """Nonces are random: one master key wraps far fewer than the 2**32 keys that NIST SP 800-38D
        allows."""
        assert self._wrapping is not None, "nothing is encrypted without a master key"
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return {
            "id": key.id,
            "wrapped": (nonce + self._wrapping.encrypt(nonce, key.secret, _bound(tenant, key.id))).hex(),
        }

    def _unwrap(self, tenant: str, entry: Mapping[str, Any]) -> DataKey:
        from cryptography.exceptions import InvalidTag

        assert self._wrapping is not None
        key_id, wrapped = int(entry["id"]), bytes.fromhex(entry["wrapped"])
        try:
            secret = self._wrapping.decrypt(
                wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _bound(tenant, key_id)
            )
        except InvalidTag:
            raise KeyringError(
                f"{self._path} was made with another master key, or is damaged; put the right "
                "encryption.master_key back, or remove the file: what was encrypted is then lost"
            ) from None
        return DataKey(key_id, secret)


def _bound(tenant: str, key_id: int) -> bytes:
    """Return what a wrapped key is bound to: moved to another tenant's name it is none."""
    return b"kvtier data key" + key_id.to_bytes(4, "big") + tenant.encode()


def _aead(master_key: bytes) -> Any:
    assert len(master_key) == KEY_BYTES
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise KeyringError(
            "encryption.master_key needs the package cryptography; `pip install kvtier[encryption]`"
        ) from error
    return AESGCM(master_key)
