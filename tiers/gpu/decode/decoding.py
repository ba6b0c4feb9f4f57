"""DeviceDecoding: whatever codec a record is in, decoded on the device and hashed there.

    encoded bytes on the device -> decoder of its codec -> slot -> xxh3-128 of the slot -> to the host

Fragments of one codec and shape are one call of a few kernels each. What a device cannot decode (other
codecs, records of varying length) is the host's, and so is what finds no scratch: the answer says which.
Never ran on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple, TypeAlias

from ...codecs.base import Codec, Shape
from ...codecs.exact.exponents import Exponents
from ...codecs.exact.float8 import Float8
from ...codecs.lossy.profiled import Profiled
from ..device.contract import Device, Stream
from ..device.launching import load
from ..device.slabs import Ticket
from . import digest_kernels, exponent_kernels, float8_kernels, quantised_kernels
from .digest import DeviceDigest, digests_of
from .exponents import DeviceExponents
from .float8 import DeviceFloat8
from .quantised import DeviceQuantised
from .records import CallLimits, Record, RecordDecoder


class DecodeItem(NamedTuple):
    """A fragment to decode: its codec (None: it is raw, and lies in its slot), shape and addresses."""

    codec: Codec | None
    shape: Shape
    record: Record


#: Returns the checksum of each slot: empty where nothing encodes to its record, None where there was no
#: scratch for it. To be called once, when the device is known to be done.
Digests: TypeAlias = Callable[[], list[bytes | None]]


class DeviceDecoding:
    """Decoders and digest of one device. For one thread at a time. `close` when no stream works for it."""

    def __init__(
        self,
        exponents: DeviceExponents,
        float8: DeviceFloat8,
        quantised: DeviceQuantised,
        digest: DeviceDigest,
    ) -> None:
        self._decoders: dict[type, RecordDecoder] = {
            Exponents: exponents,
            Float8: float8,
            Profiled: quantised,
        }
        self._digest = digest

    def takes(self, codec: Codec | None, shape: Shape, stored_bytes: int) -> bool:
        """Whether fragments of `shape` can be decoded here, or only hashed where `codec` is None.

        `stored_bytes`: how long their records' payloads are. Any thread.
        """
        limits = self._limits(codec, shape)
        return limits.max_fragments > 0 and stored_bytes >= limits.min_bytes

    def _limits(self, codec: Codec | None, shape: Shape) -> CallLimits:
        num_hashed = self._digest.max_fragments(shape.raw_bytes)
        if codec is None:
            return CallLimits(0, num_hashed)
        decoder = self._decoders.get(type(codec))
        min_bytes, num_decoded = decoder.limits(codec, shape) if decoder is not None else (0, 0)
        return CallLimits(min_bytes, min(num_hashed, num_decoded))

    def enqueue(self, stream: Stream, works: Sequence[DecodeItem]) -> Digests:
        """Enqueue everything for `works`, all of which it `takes`.

        Raises DeviceError; scratch of calls that were begun is then not used again.
        """
        calls = [(positions, self._call(stream, positions, works)) for positions in self._calls(works)]

        def results() -> list[bytes | None]:
            found: list[bytes | None] = [None] * len(works)
            for positions, call in calls:
                decoded, hashed = call
                wrong = [0] * len(positions) if decoded is None else decoded.results().tolist()
                digests = [None] * len(positions) if hashed is None else digests_of(hashed)
                for position, digest, is_wrong in zip(positions, digests, wrong, strict=True):
                    found[position] = b"" if is_wrong else digest
            return found

        return results

    def _calls(self, works: Sequence[DecodeItem]) -> Iterator[list[int]]:
        """Cut works into calls: one codec, one shape, no more of them than a call takes."""

        def kind(position: int) -> tuple[int, Shape]:
            return id(works[position].codec), works[position].shape

        for _, run in groupby(sorted(range(len(works)), key=kind), kind):
            positions = list(run)
            most = self._limits(*works[positions[0]][:2]).max_fragments
            for first in range(0, len(positions), most):
                yield positions[first : first + most]

    def _call(
        self, stream: Stream, positions: list[int], works: Sequence[DecodeItem]
    ) -> tuple[Ticket | None, Ticket | None]:
        """Return the tickets of decoding, None where they are raw, and of digests, None without scratch."""
        codec, shape, _ = works[positions[0]]
        records = [works[position].record for position in positions]
        decoded = None
        if codec is not None:
            decoded = self._decoders[type(codec)].decode(stream, codec, shape, records)
            if decoded is None:
                return None, None
        return decoded, self._digest.digest(stream, [record.raw for record in records], shape.raw_bytes)

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        for slabs in (*(one.slabs for one in self._decoders.values()), self._digest.slabs):
            slabs.close()


def load_decoding(device: Device) -> DeviceDecoding | None:
    """Compile the kernels; return what decodes on `device`, or None where kernels cannot run there.

    Raises DeviceError.
    """
    exponents = load(device, exponent_kernels.SOURCE, exponent_kernels.NAMES)
    float8 = load(device, float8_kernels.SOURCE, float8_kernels.NAMES)
    quantised = load(device, quantised_kernels.SOURCE, quantised_kernels.NAMES)
    digest = load(device, digest_kernels.SOURCE, digest_kernels.NAMES)
    if exponents is None or float8 is None or quantised is None or digest is None:
        return None
    with ExitStack() as undo:
        on_exponents = DeviceExponents(device, exponents)
        undo.callback(on_exponents.slabs.close)
        on_float8 = DeviceFloat8(device, float8)
        undo.callback(on_float8.slabs.close)
        on_profiles = DeviceQuantised(device, quantised)
        undo.callback(on_profiles.slabs.close)
        decoding = DeviceDecoding(on_exponents, on_float8, on_profiles, DeviceDigest(device, digest))
        undo.pop_all()
    return decoding
