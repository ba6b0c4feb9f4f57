"""CodecSelection: which codec is worth its time, from what the codecs and the disk do here.

    settings + speeds of codecs + bandwidth of the disk -> Choice -> CompressionChosen -> planner

A load of encoded fragments takes reading less and decoding: stored / bandwidth + raw / (speed x threads).
`auto` takes the codec for which that is least, `identity` among them; a disk as fast as the memory gets no
codec, a slow one the densest. Speeds come from a short measurement on values like KV when the first
namespace of a dtype turns up, and then from the records themselves; the bandwidth from the mover, the room
from what fragments were seen to need. Looked at again every quarter of a minute, and only then, so that
what is written does not change form with every burst. What is written before the first measurement, about a
second after a start, is stored as it is.

A namespace that names a profile is stored by it wherever `auto` would decide: a calibrated profile is meant
to save room, and what is left to read is a quarter. A codec that is named by a rule is meant, and exact.

No request waits for encoding: spills go in the background. It is left out of the sum on purpose.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...tiers.block import NamespaceIdentity, Tier
from ...tiers.codecs.base import Codec, Shape, shape_of
from ...tiers.codecs.lossy.profiled import Profiled
from ...tiers.codecs.needs import Need
from ...tiers.codecs.records import RecordCodecs
from ...tiers.codecs.registry import codec_named, codec_of_record
from ...tiers.codecs.streaming import CANDIDATES
from ..appliance import Appliance
from ..config import CompressionSettings
from ..core.encodings import Encoding
from ..core.events import CompressionChosen
from ..transfer.lanes import EdgeStatistics
from .codec_trials import compile_apart, decode_speed

log = logging.getLogger(__name__)

DEFAULT_BANDWIDTH_BYTES_PER_S = 1e9  # of the device, until it is measured
EXPORT_BANDWIDTH_BYTES_PER_S = 0.3e9  # of one fetch, to a real gateway; a connection to S3 gives less
INTERVAL_S = 15.0
GLANCE_S = 1.0  # how soon a dtype that was not there before is noticed
MIN_DECODED_BYTES = 64 << 20  # before what records tell replaces the measurement


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """Implements Compression. Speeds are bytes of payload a second and thread, by dtype and codec name."""

    settings: CompressionSettings
    decode_speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    bandwidth_bytes_per_s: float = DEFAULT_BANDWIDTH_BYTES_PER_S
    num_threads: int = 1
    profiled: Mapping[bytes, Profiled] = field(default_factory=dict)  # by the digests namespaces name
    reserves: Mapping[Need, float] = field(default_factory=dict)  # shares of the raw size

    def encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        """Return how the fragments of each layer group are to be stored; None: as they are."""
        profiled = self.profiled.get(identity.profile_digest)
        if profiled is None:
            return self.exact_encodings_of(identity)
        return tuple(
            self._profiled_encoding(profiled, identity, group)
            for group in range(identity.geometry.num_groups)
        )

    def exact_encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        """Return the same for fragments that must not lose anything, whatever their namespace agreed to."""
        return tuple(self._encoding(identity, group) for group in range(identity.geometry.num_groups))

    def _profiled_encoding(
        self, profiled: Profiled, identity: NamespaceIdentity, group: int
    ) -> Encoding | None:
        shape = shape_of(identity.geometry, group)
        if self.settings.codec_for(identity, group) == "auto" and profiled.accepts(shape):
            return Encoding(profiled.codec_id, profiled.stored_bound(shape))
        return self._encoding(identity, group)

    def _encoding(self, identity: NamespaceIdentity, group: int) -> Encoding | None:
        shape = shape_of(identity.geometry, group)
        name: str = self.settings.codec_for(identity, group)
        if name == "auto":
            name = min(("identity", *CANDIDATES), key=lambda one: self._load_s(one, identity, group))
        codec = codec_named(name)
        stored_bytes = self._stored_bytes(codec, shape, identity, group)
        if name == "identity" or not codec.accepts(shape) or stored_bytes >= shape.raw_bytes:
            return None
        return Encoding(codec.codec_id, stored_bytes)

    def _stored_bytes(self, codec: Codec, shape: Shape, identity: NamespaceIdentity, group: int) -> int:
        """Return what to reserve: what these fragments were seen to need, or what the codec thinks."""
        share = self.reserves.get(Need(codec.codec_id, identity.digest, group))
        return math.ceil(share * shape.raw_bytes) if share else codec.stored_bound(shape)

    def _load_s(self, name: str, identity: NamespaceIdentity, group: int) -> float:
        """Return the seconds until a fragment is readable; without end where that is not known."""
        shape = shape_of(identity.geometry, group)
        if name == "identity":
            return shape.raw_bytes / self.bandwidth_bytes_per_s
        codec = codec_named(name)
        speed = self.decode_speeds.get((shape.dtype, name), 0.0)
        if not speed or not codec.accepts(shape):
            return float("inf")
        stored_bytes = self._stored_bytes(codec, shape, identity, group)
        return stored_bytes / self.bandwidth_bytes_per_s + shape.raw_bytes / (speed * self.num_threads)


class CodecSelection:
    """Keeps the planner's choice of codecs up to date. Owned by the event loop; measures apart from it."""

    def __init__(
        self,
        settings: CompressionSettings,
        appliance: Appliance,
        codecs: RecordCodecs,
        dtypes: Callable[[], set[str]],
        edges: Callable[[], list[EdgeStatistics]],
        num_threads: int,
    ) -> None:
        self._settings = settings
        self._appliance = appliance
        self._codecs = codecs
        self._dtypes = dtypes
        self._edges = edges
        self._num_threads = num_threads
        self._speeds: dict[tuple[str, str], float] = {}
        self._tried: set[tuple[str, str]] = set()  # in this process: what records tell loads no encoder
        self._expected: frozenset[str] = frozenset()
        self._chosen = CodecChoice(settings, num_threads=num_threads, profiled=codecs.profiled)
        self._appliance.step(CompressionChosen(self._chosen))

    @property
    def speeds(self) -> Mapping[tuple[str, str], float]:
        """Bytes of payload a second that one thread decodes, by dtype and codec; 0 where it cannot.
        Empty until something was measured."""
        return dict(self._speeds)

    def export_codecs(self, identity: NamespaceIdentity) -> list[Codec | None]:
        """Return the exact codec of each layer group in bundles of an object store; None: as they are.

        As on nvme, but for the bandwidth that `auto` goes by: a network takes longer. Any thread may call it.
        """
        chosen = replace(self._chosen, bandwidth_bytes_per_s=EXPORT_BANDWIDTH_BYTES_PER_S)
        encodings = chosen.exact_encodings_of(identity)
        return [codec_of_record(one.codec_id, b"") if one is not None else None for one in encodings]

    def expect(self, dtypes: frozenset[str]) -> None:
        """Measure for these dtypes before any namespace has them."""
        self._expected = dtypes

    def adopt(self, settings: CompressionSettings) -> None:
        """Replace the settings."""
        self._settings = settings
        self._choose()

    async def run(self) -> None:
        """Measure what is new and choose again, every now and then, until cancelled."""
        while True:
            dtypes = self._dtypes() | self._expected
            await self._measure(dtypes)
            self._choose()
            for _ in range(int(INTERVAL_S / GLANCE_S)):
                await asyncio.sleep(GLANCE_S)
                if self._dtypes() | self._expected != dtypes:
                    break

    def _choose(self) -> None:
        choice = CodecChoice(
            self._settings,
            dict(self._speeds),
            self._bandwidth(),
            self._num_threads,
            self._codecs.profiled,
            self._codecs.needs.reserves(),
        )
        if choice != self._chosen:
            self._chosen = choice
            self._appliance.step(CompressionChosen(choice))

    def _bandwidth(self) -> float:
        """Return the bytes a second that the device gives: the mover counts what was decoded from them."""
        for edge in self._edges():
            is_decoded_here = (edge.source, edge.target) == (Tier.NVME.label, Tier.DRAM.label)
            if is_decoded_here and edge.bandwidth_bytes_per_s and edge.num_bytes:
                statistics = self._codecs.statistics()
                saved = sum(b.decoded_raw_bytes - b.decoded_stored_bytes for b in statistics)
                return edge.bandwidth_bytes_per_s * max(0.0, 1 - saved / edge.num_bytes) or 1.0
        return DEFAULT_BANDWIDTH_BYTES_PER_S

    async def _measure(self, dtypes: set[str]) -> None:
        named = {self._settings.codec, *(rule.codec for rule in self._settings.rules)}
        names = [one for one in CANDIDATES if "auto" in named or one in named]
        if not names:
            return
        new = {(dtype, name) for dtype in dtypes for name in names} - self._tried
        await compile_apart([(name, dtype) for dtype, name in sorted(new)])
        self._tried |= new
        for dtype, name in sorted(new):
            self._speeds[dtype, name] = await asyncio.to_thread(decode_speed, name, dtype)
            if speed := self._speeds[dtype, name]:
                log.info("codec %s decodes %s at %.1f GB/s", name, dtype, speed / 1e9)
        for statistics in self._codecs.statistics():
            if statistics.decoded_raw_bytes >= MIN_DECODED_BYTES and statistics.decode_s > 0:
                for dtype in dtypes:
                    self._speeds[dtype, statistics.name] = statistics.decoded_raw_bytes / statistics.decode_s
