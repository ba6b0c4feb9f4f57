"""Signatures of profiles: who vouches for what a model may lose. Ed25519 (RFC 8032), in the profile's file.

The digest says which profile this is; it says nothing of who made it. Where `compression.trusted_keys` names
public keys, only profiles that one of them signed are taken. What is signed is the digest, which covers
everything a decoder needs, so that comments and line breaks stay free and a signature cannot be moved to
other content. Certificates and expiry were left out: a profile is as good in a year as it is today, and
whoever changes the list of keys changes whom the daemon believes.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from .profile import Profile, ProfileError
from .profile_file import read_profile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
_PURPOSE = b"kvtier profile 1\0"  # what is signed for one thing must not do for another
_LINES = re.compile(r"(?m)^(signed_by|signature):.*\n")


class Signature(NamedTuple):
    """Who signed, and the proof."""

    public_key: bytes
    proof: bytes


def new_key(path: Path) -> bytes:
    """Write a new private key (PEM, readable by its owner only); return its public key. Raises
    FileExistsError, OSError, and ProfileError without the library."""
    ed25519, serialization = _library()
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)
    return _public_bytes(key)


def read_key(path: Path) -> "Ed25519PrivateKey":
    """Return the private key in a file. Raises ProfileError, saying what it should be, and OSError."""
    ed25519, serialization = _library()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ProfileError(f"{path} is no private key in PEM; `kvtier profile keygen` makes one") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ProfileError(f"{path} is not an Ed25519 key; `kvtier profile keygen` makes one")
    found: Ed25519PrivateKey = key
    return found


def sign_file(path: Path, key: "Ed25519PrivateKey") -> Signature:
    """Put the signature of `key` into a profile's file, in place of a former one. Raises ProfileError for a
    file that is no profile, and OSError."""
    profile = read_profile(path)
    signature = Signature(_public_bytes(key), key.sign(_PURPOSE + profile.digest))
    lines = f"signed_by: {signature.public_key.hex()}\nsignature: {signature.proof.hex()}\n"
    text = _LINES.sub("", path.read_text())
    head, digest_line, rest = text.partition(f"digest: {profile.digest.hex()}\n")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text((head + digest_line + lines + rest) if digest_line else text + lines)
    os.replace(beside, path)
    return signature


def read_signature(path: Path) -> Signature | None:
    """Return the signature in a profile's file, unchecked; None without one. Raises ProfileError when it is
    damaged, and OSError."""
    document: Any = yaml.safe_load(path.read_text())
    if not isinstance(document, dict) or "signature" not in document:
        return None
    try:
        public_key = bytes.fromhex(document["signed_by"])
        proof = bytes.fromhex(document["signature"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{path}: signed_by and signature are hex; sign it again") from error
    if (len(public_key), len(proof)) != (PUBLIC_KEY_BYTES, SIGNATURE_BYTES):
        raise ProfileError(f"{path}: signed_by or signature is cut short; sign it again")
    return Signature(public_key, proof)


def is_signed_by(profile: Profile, signature: Signature) -> bool:
    """Whether the key that `signature` names signed this profile."""
    ed25519, _ = _library()
    from cryptography.exceptions import InvalidSignature

    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(signature.public_key)
        key.verify(signature.proof, _PURPOSE + profile.digest)
    except (InvalidSignature, ValueError):
        return False
    return True


def why_not_trusted(profile: Profile, path: Path, trusted_keys: frozenset[bytes]) -> str:
    """Return why a profile's file is not vouched for by one of `trusted_keys`; empty when it is. Raises
    ProfileError, OSError."""
    signature = read_signature(path)
    if signature is None:
        return "it is not signed; `kvtier profile sign` it with a key of compression.trusted_keys"
    if signature.public_key not in trusted_keys:
        return f"{signature.public_key.hex()} signed it, which is not one of compression.trusted_keys"
    if not is_signed_by(profile, signature):
        return "its signature is of another profile; sign it again"
    return ""


def _public_bytes(key: "Ed25519PrivateKey") -> bytes:
    return key.public_key().public_bytes_raw()


def _library() -> tuple[Any, Any]:
    """Return cryptography's modules. Raises ProfileError, saying what to install."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ProfileError(
            f"signatures need cryptography; pip install 'kvtier[encryption]' ({error})"
        ) from error
    return ed25519, serialization
