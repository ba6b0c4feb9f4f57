"""Master keys: what the tenants' data keys are wrapped with, and the file that holds them.

    # the one in force first; older ones below it, as long as something is still wrapped with them
    5f0c...   64 hex digits
    91d2...

The file is the administrator's: kvtier reads it and never writes it. To change the master key, put a new line
on top and reload: every data key is wrapped anew under the first line (keyring.py), then the others may go.
No record is touched, because records are encrypted with data keys.

A key is called by its id, 8 hex digits of a hash of it. Keys are 256 random bits, so their ids tell nothing
and may stand in key files, logs and metrics.

Rejected: a name before each key, which people would have to invent and could exchange; a key per file in a
folder, where the order of two of them would be the order of their names.
"""

import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from ...v1.files import open_regular_file
from ..base import ColdStoreError

KEY_BYTES = 32
MAX_KEYS = 16
_MAX_FILE_BYTES = 16 << 10
_NONCE_BYTES = 12
WRAPPED_BYTES = _NONCE_BYTES + KEY_BYTES + 16  # of a wrapped key, with its tag
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")


class KeyringError(ColdStoreError):
    """The keys cannot be used. The message names the file and the fix."""


class MasterKeys:
    """The keys of one file, the one in force first. Immutable; raises KeyringError without `cryptography`.

    `secrets`: at least one, KEY_BYTES each, all different.
    """

    def __init__(self, *keys: bytes) -> None:
        assert keys
        self._ciphers = {key_id(key): _cipher(key) for key in keys}
        self.ids = tuple(self._ciphers)

    @property
    def current_id(self) -> str:
        """The id of the key that new wraps are made with."""
        return self.ids[0]

    def __repr__(self) -> str:
        return f"MasterKeys({', '.join(self.ids)})"

    def wrap(self, secret: bytes, bound: bytes) -> bytes:
        """Return `secret` encrypted with the key in force; unwrapping needs the same `bound`.
        Nonces are random: one master key wraps far fewer than the 2**32 secrets that NIST SP 800-38D allows.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped: bytes = self._ciphers[self.current_id].encrypt(nonce, secret, bound)
        return nonce + wrapped

    def unwrap(self, wrapped: bytes, bound: bytes) -> tuple[str, bytes] | None:
        """Return the id of the key that `wrapped` was made with, and what is in it.
        None when it is none of these, or damaged. Every key is tried: there are few, and no word in a file
        has to be believed."""
        from cryptography.exceptions import InvalidTag

        for name, cipher in self._ciphers.items():
            try:
                return name, cipher.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], bound)
            except InvalidTag:
                continue
        return None


def key_id(key: bytes) -> str:
    """Return the id of a master key, 8 hex digits."""
    return hashlib.sha256(b"kvtier master key" + key).hexdigest()[:8]


def read_master_keys(path: Path, *, owner_uid: int | None = None) -> list[bytes]:
    """Return the keys of a file, the one in force first.
    Only the user `owner_uid` (this process's unless given) may be able to read it; of a Secret that a kubelet
    mounted its group, too: the file is root's, and no process outside of the pod sees it.

    Raises KeyringError: it is missing, others could read it, or it holds something else.
    """
    owner_uid = os.geteuid() if owner_uid is None else owner_uid
    try:
        with open_regular_file(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_FILE_BYTES + 1).decode("ascii", "replace")
    except PermissionError:
        raise KeyringError(
            f"encryption.master_key: {path} cannot be read; `chown {owner_uid} {path} && chmod 600 {path}`"
        ) from None
    except OSError as error:
        raise KeyringError(
            f"encryption.master_key: {path}: {error.strerror}; put the file back, or make a first one with "
            f"`(umask 077; openssl rand -hex 32 > {path})`"
        ) from error
    is_secret = _is_mounted_secret(path)
    forbidden = stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if is_secret else stat.S_IRWXG)
    if status.st_mode & forbidden:
        raise KeyringError(
            f"encryption.master_key: {path} has mode {stat.S_IMODE(status.st_mode):04o}, others could read "
            f"it; {'set defaultMode: 0440 for the Secret' if is_secret else f'`chmod 600 {path}`'}"
        )
    if status.st_uid not in (0, owner_uid):
        raise KeyringError(
            f"encryption.master_key: {path} belongs to user {status.st_uid}; give it to user {owner_uid}"
        )
    try:
        return parse_master_keys(text)
    except ValueError as error:
        raise KeyringError(f"encryption.master_key: {path}: {error}") from None


def parse_master_keys(text: str) -> list[bytes]:
    """Return the keys that a file says. Raises ValueError, naming the line; never with what is in it."""
    if len(text) > _MAX_FILE_BYTES:
        raise ValueError(
            f"is longer than {_MAX_FILE_BYTES} bytes; write up to {MAX_KEYS} lines of 64 hex digits"
        )
    found: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if _HEX_KEY.fullmatch(word) is None:
            raise ValueError(
                f"line {number} must hold 64 hex digits and nothing else; `openssl rand -hex 32`"
            )
        key = bytes.fromhex(word)
        if key in found:
            raise ValueError(f"line {number} repeats line {found[key]}; remove one of them")
        found[key] = number
    if not found:
        raise ValueError("must hold 64 hex digits; `openssl rand -hex 32`")
    if len(found) > MAX_KEYS:
        raise ValueError(
            f"holds {len(found)} keys; at most {MAX_KEYS} can be unwrapped with, remove the last ones"
        )
    return list(found)


def _is_mounted_secret(path: Path) -> bool:
    """Return whether `path` is a key of a Secret that a kubelet mounted: a link by way of `..data`, which it
    exchanges to publish all keys at once."""
    return path.is_symlink() and path.readlink().parts[:1] == ("..data",)


def load_master_keys(path: Path) -> MasterKeys:
    """Return the keys of a file, ready to be used. Raises KeyringError."""
    return MasterKeys(*read_master_keys(path))


def _cipher(key: bytes) -> Any:
    assert len(key) == KEY_BYTES
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise KeyringError(
            "encryption.master_key needs the package cryptography; `pip install kvtier[encryption]`"
        ) from error
    return AESGCM(key)
