"""DeviceDecoding: whatever codec a record is in, decoded on the device and hashed there.

    encoded bytes on the device -> decoder of its codec -> slot -> xxh3-128 of the slot -> to the host

Fragments of one codec and shape are one call of a few kernels each. What a device cannot decode (other
codecs, records of varying length) is the host's, and so is what finds no scratch: the answer says which.
Never ran on a GPU.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ...codecs.base import Codec, Shape
from ...codecs.exact.exponents import Exponents
from ...codecs.lossy.profiled import Profiled
from ..device.contract import Device, DeviceError, Stream
from ..device.launching import load
from . import exponent_kernels, quantised_kernels
from .digest import DeviceDigest, DigestTicket, load_digest
from .exponents import DeviceExponents, Record, Ticket
from .quantised import MAX_FRAGMENTS, DeviceQuantised, QuantisedTicket


class DecodeItem(NamedTuple):
    """A fragment to decode: its codec (None: it is raw, and lies in its slot), shape and addresses."""

    codec: Codec | None
    shape: Shape
    record: Record


class DecodeCall(NamedTuple):
    """Fragments of one call, by their positions, and the tickets by which the device will say what came of
    them."""

    positions: list[int]
    decoded: Ticket | QuantisedTicket | None
    digests: DigestTicket


class Findings:
    """What the device will have found of the works of one `enqueue`."""

    def __init__(self, num_works: int, parts: list[DecodeCall]) -> None:
        self._num_works = num_works
        self._parts = parts

    def digests(self) -> list[bytes | None]:
        """Return the checksum of each slot; empty where nothing encodes to that record, None where there was
        no scratch for it. Call it once, when the device is known to be done."""
        found: list[bytes | None] = [None] * self._num_works
        for part in self._parts:
            digests = part.digests.results()
            if isinstance(part.decoded, Ticket):
                wrong = part.decoded.results()[0].tolist()
            elif part.decoded is not None:
                wrong = part.decoded.status().tolist()
            else:
                wrong = [0] * len(digests)
            for position, digest, is_wrong in zip(part.positions, digests, wrong, strict=True):
                found[position] = b"" if is_wrong else digest
        return found


class DeviceDecoding:
    """Decoders and digest of one device. For one thread at a time. `close` when no stream works for it."""

    def __init__(self, exponents: DeviceExponents, quantised: DeviceQuantised, digest: DeviceDigest) -> None:
        self._exponents = exponents
        self._quantised = quantised
        self._digest = digest

    def takes(self, codec: Codec | None, shape: Shape, stored_bytes: int) -> bool:
        """Whether fragments of `shape`, encoded by `codec` in `stored_bytes`, can be decoded, or as they are
        only hashed, here. Any thread."""
        if not self._digest.max_fragments(shape.raw_bytes):
            return False
        if isinstance(codec, Exponents):
            is_long_enough = codec.accepts(shape) and stored_bytes >= self._exponents.min_bytes(shape)
            return is_long_enough and self._exponents.max_fragments(shape) > 0
        if isinstance(codec, Profiled):
            least_bytes = self._quantised.min_bytes(codec, shape)
            return least_bytes is not None and stored_bytes >= least_bytes
        return codec is None

    def enqueue(self, stream: Stream, works: Sequence[DecodeItem]) -> Findings:
        """Enqueue everything for `works`, all of which it `takes`. Raises DeviceError; scratch of calls that
        were begun is then not used again."""
        parts = []
        for positions in self._calls(works):
            part = self._call(stream, positions, works)
            if part is not None:
                parts.append(part)
        return Findings(len(works), parts)

    def _calls(self, works: Sequence[DecodeItem]) -> Iterator[list[int]]:
        """Cut works into calls: one codec, one shape, no more of them than a call takes."""

        def kind(position: int) -> tuple[int, Shape]:
            return id(works[position].codec), works[position].shape

        for _, run in groupby(sorted(range(len(works)), key=kind), kind):
            positions = list(run)
            codec, shape = works[positions[0]].codec, works[positions[0]].shape
            most = self._digest.max_fragments(shape.raw_bytes)
            if isinstance(codec, Exponents):
                most = min(most, self._exponents.max_fragments(shape))
            elif codec is not None:
                most = min(most, MAX_FRAGMENTS)
            for first in range(0, len(positions), most):
                yield positions[first : first + most]

    def _call(self, stream: Stream, positions: list[int], works: Sequence[DecodeItem]) -> DecodeCall | None:
        if not self._digest.has_scratch:
            return None
        codec, shape, _ = works[positions[0]]
        records = [works[position].record for position in positions]
        decoded: Ticket | QuantisedTicket | None = None
        if isinstance(codec, Profiled):
            decoded = self._quantised.decode(stream, codec, shape, records)
        elif codec is not None:
            decoded = self._exponents.decode(stream, shape, records)
        if codec is not None and decoded is None:
            return None
        digests = self._digest.digest(stream, [record.raw for record in records], shape.raw_bytes)
        assert digests is not None, "only this thread takes scratch"
        return DecodeCall(positions, decoded, digests)

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        for part in (self._exponents, self._quantised, self._digest):
            part.close()


def load_decoding(device: Device) -> DeviceDecoding | None:
    """Return what decodes on `device`; None where kernels cannot run there. Compiles them. Raises
    DeviceError."""
    exponents = load(device, exponent_kernels.SOURCE, exponent_kernels.NAMES)
    quantised = load(device, quantised_kernels.SOURCE, quantised_kernels.NAMES)
    digest = load_digest(device)
    if exponents is None or quantised is None or digest is None:
        return None
    made: list[DeviceExponents | DeviceQuantised] = []
    try:
        made.append(on_exponents := DeviceExponents(device, exponents))
        made.append(on_profiles := DeviceQuantised(device, quantised))
    except DeviceError:
        for part in (*made, digest):
            part.close()
        raise
    return DeviceDecoding(on_exponents, on_profiles, digest)
