"""Bearer tokens: a file of names and hashes, and the name of a token.

    # name  SHA-256 of the token
    ops     2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b

The daemon never keeps a token, only its hash, and compares with all of them in constant time. SHA-256 without
salt or stretching is enough because tokens are made here, of 256 random bits: there is nothing to guess.
The file is read again when it changes; one that cannot be read leaves what was known and says so in the log.
"""

import hashlib
import hmac
import logging
import re
import secrets
from pathlib import Path

from ...v1.files import read_regular_file
from ..config import check_name
from ..errors import StartError

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
PREFIX = "kvt_"  # so that scanners for leaked secrets know one when they see one
_HASH = re.compile(r"[0-9a-f]{64}")


def make_token() -> str:
    """Return a new token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return what the file keeps of a token: 64 hex digits."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def parse(text: str) -> dict[str, str]:
    """Return the hash of each name. Raises ValueError with the line that is wrong."""
    hashes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or _HASH.fullmatch(words[1]) is None:
            raise ValueError(f"line {number}: write a name and the SHA-256 of its token, 64 hex digits")
        try:
            name = check_name(words[0])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if name in hashes:
            raise ValueError(f"line {number}: {name} has a token already; one name, one token")
        hashes[name] = words[1]
    return hashes


def read_tokens(path: Path) -> dict[str, str]:
    """Return the hash of each name in a file. Raises OSError, and ValueError with the line that is wrong."""
    return parse(read_regular_file(path, MAX_FILE_BYTES).decode("utf-8"))


class TokenFile:
    """The tokens of one file. Raises StartError when it cannot be read at start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._hashes = read_tokens(path)
        except OSError as error:
            fix = "`kvtier tenant token NAME` makes its lines"
            raise StartError(f"access.tokens: cannot read {path}: {error.strerror}; {fix}") from error
        except ValueError as error:
            raise StartError(f"access.tokens: {path}: {error}") from error

    def name_of(self, token: str) -> str | None:
        """Return the name of a token, None for an unknown one. Takes as long for any of them."""
        wanted = hash_of(token)
        found = None
        for name, known in self._hashes.items():
            if hmac.compare_digest(known, wanted):
                found = name
        return found

    def read_again(self) -> bool:
        """Use what the file holds now; return whether it differs. One that cannot be read changes nothing.
        Blocks, never raises."""
        before = self._hashes
        try:
            self._hashes = read_tokens(self.path)
        except (OSError, ValueError) as error:
            log.error("access.tokens: %s: %s; the tokens read before still hold", self.path, error)
        return self._hashes != before
