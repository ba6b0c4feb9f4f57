"""Credentials of S3 out of a file, in the form that AWS's own tools write.

obstore knows the environment, web identities and the roles of machines and containers, but no file with keys,
which is how secrets are mounted and exchanged. The file is read again when it was changed or replaced, so an
exchanged key needs no restart; until then no request reads it. It is only used where it is named:
`~/.aws/credentials` belongs to the user of a shell, and no daemon looks for it.
"""

import configparser
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from .problems import StoreError, StoreProblem

FILE, PROFILE, KEY = "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"
MAX_BYTES: Final = 65_536
_LOOK_AGAIN_S: Final = 30.0  # obstore asks again when less than minutes are left: at most ten times a second


class CredentialsFile:
    """What obstore asks for keys. Thread-safe. Calls raise StoreError, which names no key."""

    def __init__(self, path: str, profile: str) -> None:
        self._path, self._profile = path, profile
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] = ()
        self._keys: dict[str, str | None] = {}

    def __call__(self) -> dict[str, Any]:
        """Return keys in obstore's words, good for some seconds."""
        with self._lock:
            try:
                found = os.stat(self._path)
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen != self._seen:
                    self._keys, self._seen = self._read(), seen
            except (OSError, UnicodeError, configparser.Error) as error:
                # The text of a parser's error has lines of the file in it.
                raise self._problem(f"cannot be read: {type(error).__name__}") from None
            return {**self._keys, "expires_at": datetime.now(UTC) + timedelta(seconds=_LOOK_AGAIN_S)}

    def _read(self) -> dict[str, str | None]:
        if not os.path.isfile(self._path):
            raise self._problem("is no regular file")
        with open(self._path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES)
        parsed = configparser.ConfigParser(interpolation=None)
        parsed.read_string(text)
        keys = parsed[self._profile] if parsed.has_section(self._profile) else {}
        if not keys.get("aws_access_key_id") or not keys.get("aws_secret_access_key"):
            raise self._problem(f"has no aws_access_key_id and aws_secret_access_key in [{self._profile}]")
        return {
            "access_key_id": keys["aws_access_key_id"],
            "secret_access_key": keys["aws_secret_access_key"],
            "token": keys.get("aws_session_token") or None,
        }

    def _problem(self, what: str) -> StoreError:
        return StoreError(StoreProblem.NO_CREDENTIALS, f"{FILE}: {self._path} {what}")


def credentials_file(environment: Mapping[str, str]) -> CredentialsFile | None:
    """Return the file that the environment names; None when it names none, or keys themselves.
    Raises StoreError when there are no keys in it."""
    path = environment.get(FILE, "")
    if not path or environment.get(KEY):
        return None
    named = CredentialsFile(path, environment.get(PROFILE) or "default")
    named()
    return named
