"""Registry of codecs: by name for settings, by number for records.

A number is never reused for another meaning: records outlive the program. A name is what administrators
write.
"""

from collections.abc import Callable
from typing import Final

from .base import Codec, CodecError
from .exact.exponents import Exponents
from .exact.float8 import Float8
from .exact.general import Lz4, Zstd
from .exact.identity import Identity
from .exact.planes import Planes
from .lossy.profiled import Profiled

#: Exact codecs, in the order in which a stream prefers them. A new one is a line here and its file.
BY_NAME: Final[dict[str, Callable[[], Codec]]] = {
    "identity": Identity,
    "exponents": Exponents,
    "float8": Float8,
    "planes": Planes,
    "lz4": Lz4,
    "zstd": Zstd,
}
_BY_ID: Final[dict[int, Callable[[], Codec]]] = {make().codec_id: make for make in BY_NAME.values()}
assert len(_BY_ID) == len(BY_NAME), "two codecs have one number"
#: Numbers of codecs in records that this version reads.
KNOWN_CODECS: Final = frozenset({*_BY_ID, Profiled.codec_id})


def codec_named(name: str) -> Codec:
    """Return the exact codec of a name. Raises CodecError, listing the names there are."""
    if name not in BY_NAME:
        raise CodecError(f"there is no codec {name!r}; there are {', '.join(BY_NAME)}")
    return BY_NAME[name]()


def codec_of_record(codec_id: int, parameters: bytes) -> Codec:
    """Return the exact codec that reads a record.
    Raises CodecError for a number or parameters that this version does not know; RecordCodecs handles records
    of profiles."""
    if codec_id not in _BY_ID:
        raise CodecError(f"codec {codec_id} is not one of this version's")
    if parameters:
        raise CodecError(f"codec {codec_id} with parameters that this version does not know")
    return _BY_ID[codec_id]()
