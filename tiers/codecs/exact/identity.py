"""Identity: bytes as they are. What every fragment can fall back to."""

from ...base import Buffer
from ...payload import copy
from ..base import CodecError, DoesNotFit, ExactCodec, Shape


class Identity(ExactCodec):
    """Implements Codec without encoding anything."""

    codec_id = 0
    name = "identity"
    library = ""

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Copy `payload` to `into`; return its length. Raises DoesNotFit."""
        if len(into) < shape.raw_bytes:
            raise DoesNotFit
        copy(into[: shape.raw_bytes], payload)
        return shape.raw_bytes

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Copy `stored` to `into`. Raises CodecError when there are too few bytes."""
        if len(stored) < shape.raw_bytes:
            raise CodecError(f"identity: {len(stored)} of {shape.raw_bytes} bytes")
        copy(into, stored[: shape.raw_bytes])
