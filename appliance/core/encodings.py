"""Encodings: in which form fragments rest in the cold store, and how much room that takes.

The planner never sees bytes, so it reserves what a codec says it needs for a fragment of this shape, and
lets the mover find out whether it fits. What does not is noted, and stored as it is the next time round.

The codec is decided elsewhere (`Compression`: settings, measured speeds, what a namespace allows);
here it is a number in a table, because a fragment has two bytes for it. The table grows with codecs and
shapes, not with fragments.

What was decoded from a lossy record has spent its error budget. It is not encoded lossily again: the choice
for such fragments is another one (`exact_encodings_of`), whatever the namespace agreed to.
"""

from typing import NamedTuple, Protocol

from ...tiers.block import NamespaceIdentity
from ...tiers.codecs.base import PROFILED_ID

AS_IT_IS = 0  # the number of no encoding
MAX_ENCODINGS = 1 << 16


class Encoding(NamedTuple):
    """A codec, and the bytes it is given for one fragment."""

    codec_id: int
    stored_bytes: int


class Compression(Protocol):
    """Chooses codecs. Deterministic between two changes of policy."""

    def encodings_of(self, identity: NamespaceIdentity) -> "tuple[Encoding | None, ...]":
        """Return how the fragments of each layer group are to be stored; None: as they are."""
        ...

    def exact_encodings_of(self, identity: NamespaceIdentity) -> "tuple[Encoding | None, ...]":
        """Return the same for fragments that must not lose anything, or anything more."""
        ...


def is_lossy(codec_id: int) -> bool:
    """Whether fragments may lose something in a codec."""
    return codec_id == PROFILED_ID


class NoCompression:
    """Everything as it is."""

    def encodings_of(self, identity: NamespaceIdentity) -> "tuple[Encoding | None, ...]":
        """Return nothing for every layer group."""
        return (None,) * identity.geometry.num_groups

    def exact_encodings_of(self, identity: NamespaceIdentity) -> "tuple[Encoding | None, ...]":
        """Return the same."""
        return self.encodings_of(identity)


class Encodings:
    """Numbers for encodings, given out once and never taken back."""

    def __init__(self) -> None:
        self._encodings: list[Encoding | None] = [None]
        self._numbers: dict[Encoding, int] = {}

    def number_of(self, encoding: Encoding | None) -> int:
        """Return the number of an encoding; AS_IT_IS for None, and when there are too many."""
        if encoding is None:
            return AS_IT_IS
        number = self._numbers.get(encoding)
        if number is None:
            if len(self._encodings) >= MAX_ENCODINGS:
                return AS_IT_IS
            number = self._numbers[encoding] = len(self._encodings)
            self._encodings.append(encoding)
        return number

    def stored_bytes(self, number: int, raw_bytes: int) -> int:
        """Return the bytes a fragment of `raw_bytes` takes in this encoding."""
        encoding = self._encodings[number]
        return raw_bytes if encoding is None else encoding.stored_bytes

    def codec_id(self, number: int) -> int:
        """Return the codec of an encoding, 0 for none."""
        encoding = self._encodings[number]
        return 0 if encoding is None else encoding.codec_id

    def __len__(self) -> int:
        return len(self._encodings)
