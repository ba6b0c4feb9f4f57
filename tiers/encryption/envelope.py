"""Encryption of the payload of one record, and the envelope in its header that decrypts it.

AES-256-GCM. Under one key no nonce may ever meet two payloads, or both are as good as plain. So that this
holds by construction and not by care:

    record key   HKDF-SHA256(data key, salt)   salt: 128 random bits, drawn when a store is opened
    nonce        a counter that starts at 0 with the salt and is drawn anew for every encryption

Within one life of a store the counter never comes back. Another life, be it after a crash, on a restored key
file, a restored manifest or a copy of the whole directory, has another salt and so other record keys: two of
2**32 lives share one with a chance of 2**-65. Nothing needs to have been written down for it. What must not
be done is to run a snapshot of a machine's *memory* twice.

Encrypted is the payload as it is stored, encoded where it has a codec, and behind it the checksum of the raw
payload, which would otherwise let a thief of the device check guesses. Associated data is the identity of
the record, which is what a fragment asks for; not its place. So a record is copied forward as it stands, with
its envelope: nothing is encrypted a second time, and no key is needed.

Decrypting happens in place, in the slot the payload goes to. The slot is not published before
the tag was compared, and never when it does not match.

Rejected: a random nonce of 96 bits under the data key (a busy store writes 2**32 records in a day, where
chance ends), segment epoch and page (a record that is tried again would meet its nonce), the sequence number
(it is only as durable as the manifest). AES-GCM-SIV forgives a repeated nonce, at half the speed and two
passes.
"""

import itertools
import os
import struct
import threading
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

from ..base import Buffer, Cause, CopyError
from .keyring import DataKey
from .master_keys import KEY_BYTES

SALT_BYTES = 16
_PACKED = struct.Struct("<16sQ16s16s8x")  # salt, counter, encrypted checksum, tag
ENVELOPE_BYTES = _PACKED.size  # 64, of the on-disk format
MAX_CACHED = 4096  # record keys: one per tenant and former life of the store

assert ENVELOPE_BYTES == 64


class Envelope(NamedTuple):
    """Fields of a header that decrypt its payload, beside the id of the key."""

    salt: bytes
    counter: int
    checksum: bytes  # xxh3-128 of the raw payload, encrypted
    tag: bytes

    def pack(self) -> bytes:
        """Return the envelope as it stands in a header, ENVELOPE_BYTES."""
        return _PACKED.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> "Envelope":
        """Return the envelope of the bytes that `pack` returned."""
        return cls(*_PACKED.unpack(packed))


class DataKeys(Protocol):
    """Where the data keys of tenants are. Thread-safe."""

    def key(self, tenant: str, key_id: int) -> DataKey | None:
        """Return a tenant's key of this id; None when it is gone."""

    def key_for_writing(self, tenant: str) -> DataKey:
        """Return the key to encrypt with, made and durable when this returns. Raises CopyError."""


class Envelopes:
    """Seals and opens payloads of one life of a store. Thread-safe; long payloads release the GIL.

    Needs cryptography, version 50 or later: earlier ones keep the GIL.
    """

    def __init__(self, keyring: DataKeys) -> None:
        self.keyring = keyring
        self._salt = os.urandom(SALT_BYTES)
        self._counter = itertools.count()
        self._lock = threading.Lock()
        self._record_keys: OrderedDict[tuple[str, int, bytes], Any] = OrderedDict()

    def seal(
        self, tenant: str, identity: bytes, checksum: bytes, payload: Buffer, into: Buffer
    ) -> tuple[int, Envelope]:
        """Encrypt `payload` to `into`, of the same length, which may be the very same memory.
        Return the id of the key and the envelope. `checksum` is the raw payload's. Raises CopyError."""
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        key = self.keyring.key_for_writing(tenant)
        counter = next(self._counter)
        record_key = self._record_key(tenant, key, self._salt)
        encryptor = Cipher(record_key, modes.GCM(_nonce(counter))).encryptor()
        encryptor.authenticate_additional_data(_bound(key.id, identity))
        encryptor.update_into(payload, into)
        hidden = encryptor.update(checksum)
        encryptor.finalize()
        return key.id, Envelope(self._salt, counter, hidden, encryptor.tag)

    def open(self, tenant: str, key_id: int, identity: bytes, envelope: Envelope, payload: Buffer) -> bytes:
        """Decrypt `payload` in place; return the checksum of the raw payload.

        Raises CopyError: NO_KEY, or NOT_AUTHENTIC, when `payload` is undefined.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        key = self.keyring.key(tenant, key_id)
        if key is None:
            raise CopyError(Cause.NO_KEY)
        record_key = self._record_key(tenant, key, envelope.salt)
        decryptor = Cipher(record_key, modes.GCM(_nonce(envelope.counter))).decryptor()
        decryptor.authenticate_additional_data(_bound(key_id, identity))
        decryptor.update_into(payload, payload)
        checksum = decryptor.update(envelope.checksum)
        try:
            decryptor.finalize_with_tag(envelope.tag)
        except InvalidTag:
            raise CopyError(Cause.NOT_AUTHENTIC) from None
        return checksum

    def forget(self, tenant: str) -> None:
        """Drop the record keys that were derived from a tenant's key."""
        with self._lock:
            for known in [known for known in self._record_keys if known[0] == tenant]:
                del self._record_keys[known]

    def _record_key(self, tenant: str, key: DataKey, salt: bytes) -> Any:
        name = (tenant, key.id, salt)
        with self._lock:
            if (known := self._record_keys.get(name)) is not None:
                return known
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        made = AES256(HKDF(SHA256(), KEY_BYTES, salt, b"kvtier record key 1").derive(key.secret))
        with self._lock:
            self._record_keys[name] = made
            if len(self._record_keys) > MAX_CACHED:
                self._record_keys.popitem(last=False)
        return made


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")


def _bound(key_id: int, identity: bytes) -> bytes:
    """Return the associated data of a payload: id of the key and identity of the record."""
    return key_id.to_bytes(4, "big") + identity
