"""Dictionaries of zstd: what many records have in common, learned once and kept in a file.

    NAME.zdict     zstd's own format; its 31-bit id stands in every frame that was made with it

Which dictionary a record needs, zstd writes into the frame, so that records describe themselves and are
copied forward as they are. The id is made of the digest of the content: two dictionaries that differ have
different ids, but for one in two thousand million, and then the hash of the raw payload tells. A frame
whose dictionary is not here is a miss until it is back (CodecMissing); so a dictionary is taken away only
when no record is left.

On keys and values there is nothing that repeats; what a dictionary brings is zstd's tables, which then need
not be learned anew for each fragment: a twentieth for `zstd` over short fragments, which stay a tenth longer
than `planes` makes them without one (bench/compression/dictionary.py). They are for states of other models.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import zstandard

log = logging.getLogger(__name__)

SUFFIX = ".zdict"
MAX_FILE_BYTES = 16 << 20
_MAGIC = bytes.fromhex("37a430ec")  # of zstd's dictionaries; the id follows it
_HEAD_BYTES = 8
_FIRST_FREE_ID = 1 << 15  # those below are zstd's to give out, and so are those from 2^31 on


class DictionaryError(Exception):
    """A file that is no dictionary, or two that cannot be told apart. The message says what to do."""


def train(samples: Iterable[bytes], capacity_bytes: int) -> bytes:
    """Return a dictionary of at most `capacity_bytes` for payloads like `samples`. Raises DictionaryError."""
    try:
        trained = zstandard.train_dictionary(capacity_bytes, list(samples)).as_bytes()
    except zstandard.ZstdError as error:
        raise DictionaryError(
            f"nothing to learn from these samples ({error}); give it more of them"
        ) from error
    return _MAGIC + _id_of(trained).to_bytes(4, "little") + trained[_HEAD_BYTES:]


def read_dictionary(path: Path) -> zstandard.ZstdCompressionDict:
    """Return the dictionary in a file. Raises DictionaryError, OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DictionaryError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    content = path.read_bytes()
    if content[:4] != _MAGIC or len(content) <= _HEAD_BYTES:
        raise DictionaryError(f"{path} is no zstd dictionary; `kvtier dictionary train` makes one")
    if int.from_bytes(content[4:_HEAD_BYTES], "little") != _id_of(content):
        raise DictionaryError(f"{path} was changed: its id is not that of its content; train it again")
    return zstandard.ZstdCompressionDict(content)


def read_dictionaries(directory: Path | None) -> Mapping[str, zstandard.ZstdCompressionDict]:
    """Return the dictionaries of a directory by name, none without one. Raises DictionaryError, OSError."""
    if directory is None:
        return {}
    found: dict[str, zstandard.ZstdCompressionDict] = {}
    by_id: dict[int, str] = {}
    for path in sorted(one for one in directory.iterdir() if one.suffix == SUFFIX):
        dictionary = read_dictionary(path)
        other = by_id.setdefault(dictionary.dict_id(), path.stem)
        if other != path.stem:
            if found[other].as_bytes() != dictionary.as_bytes():
                raise DictionaryError(f"{path} and {other}{SUFFIX} have the same id; train one of them again")
            log.info("%s is %s%s again", path, other, SUFFIX)
        found[path.stem] = dictionary
    return found


def _id_of(content: bytes) -> int:
    """Return the id for a dictionary's content, which is counted without its id."""
    number = int.from_bytes(hashlib.sha256(content[_HEAD_BYTES:]).digest()[:4], "little") & 0x7FFFFFFF
    return max(number, _FIRST_FREE_ID)
