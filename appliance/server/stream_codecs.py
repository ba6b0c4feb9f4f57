"""Stream codecs: what the two streamed calls do to bytes on their way over the network.

    get: slot -> (encoded in a thread, one fragment ahead of what is being sent) -> chunks
    put: chunks -> fragment -> (decoded in a thread into the put's buffer) -> next fragment

Which codec, the policy says for each layer group (compression.codec, and rules of edge `remote`); what
`auto` takes, tiers/codecs/contest.py finds out for each connection.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ...tiers.base import Buffer
from ...tiers.block import NamespaceIdentity
from ...tiers.codecs.base import Shape, shape_of
from ...tiers.codecs.streaming import (
    CHECKSUM_BYTES,
    Encoded,
    StreamChoice,
    StreamEncoder,
    decode_fragment,
    is_brief,
    usable_codecs,
)
from ...tiers.payload import copy
from ...v1 import kvcache_pb2 as pb
from ..config import CompressionSettings
from ..core.results import ReadyFragment
from ..errors import error

MAX_AHEAD = 2  # fragments being encoded or waiting to be sent


@dataclass(slots=True)
class SentFragments:
    """What is about to be sent: a fragment, encoded or as it is in its slot, or several of the latter."""

    parts: list[ReadyFragment]
    choice: StreamChoice
    encoded: Encoded | None
    num_bytes: int  # of payload


class GetEncoder:
    """Encodes the fragments of one streamed get."""

    def __init__(
        self,
        encoder: StreamEncoder,
        settings: CompressionSettings,
        identity: NamespaceIdentity,
        view: Callable[[ReadyFragment], Buffer],
        checksum: Callable[[ReadyFragment], bytes],
    ) -> None:
        self._encoder = encoder
        self._names = stream_codecs(settings, identity)
        self._identity = identity
        self._view = view
        self._checksum = checksum

    async def messages(self, parts: Iterable[ReadyFragment], most_bytes: int) -> AsyncIterator[SentFragments]:
        """Yield fragments in order, encoded where that pays; others together, up to `most_bytes`."""
        waiting: SentFragments | None = None
        async for one in self._encode(parts):
            is_alike = waiting is not None and one.encoded is None and one.choice == waiting.choice
            if waiting is not None and is_alike and waiting.num_bytes + one.num_bytes <= most_bytes:
                waiting.parts += one.parts
                waiting.num_bytes += one.num_bytes
                continue
            if waiting is not None:
                yield waiting
            waiting = one
            if one.encoded is not None or one.num_bytes >= most_bytes:
                yield one
                waiting = None
        if waiting is not None:
            yield waiting

    async def _encode(self, parts: Iterable[ReadyFragment]) -> AsyncIterator[SentFragments]:
        """Yield fragments one by one. Long encodings run a little ahead of the reader."""
        ahead: deque[asyncio.Task[SentFragments]] = deque()
        try:
            for part in parts:
                shape = shape_of(self._identity.geometry, part.group)
                choice = self._encoder.choose(shape, self._names[part.group])
                if choice.codec is None or is_brief(choice.codec.codec_id, shape, encodes=True):
                    while ahead:
                        yield await ahead.popleft()
                    yield SentFragments([part], choice, self._encoded(part, choice, shape), part.length)
                    continue
                before = ahead[-1] if ahead else None
                ahead.append(asyncio.create_task(self._encode_apart(part, choice, shape, before)))
                if len(ahead) >= MAX_AHEAD:
                    yield await ahead.popleft()
            while ahead:
                yield await ahead.popleft()
        finally:
            await asyncio.gather(*ahead, return_exceptions=True)  # a thread may still read a slot

    async def _encode_apart(
        self,
        part: ReadyFragment,
        choice: StreamChoice,
        shape: Shape,
        before: "asyncio.Task[SentFragments] | None",
    ) -> SentFragments:
        if before is not None:
            await asyncio.wait([before])  # one at a time: a get is one thread's work
        encoded = await asyncio.to_thread(self._encoded, part, choice, shape)
        return SentFragments([part], choice, encoded, part.length)

    def _encoded(self, part: ReadyFragment, choice: StreamChoice, shape: Shape) -> Encoded | None:
        if choice.codec is None:
            return None
        return self._encoder.encode(choice.codec, shape, self._view(part), self._checksum(part))


class PutDecoder:
    """Puts the fragments of one streamed put where they belong, encoded ones decoded.

    `fill` is told how many bytes of `whole` are needed, before they are written. Raises CallerError for what
    does not add up, and what `fill` raises; then nothing of the put is stored.
    """

    def __init__(
        self, identity: NamespaceIdentity, num_blocks: int, whole: Buffer, fill: Callable[[int], None]
    ) -> None:
        geometry = identity.geometry
        self._shapes = [shape_of(geometry, group) for group in range(geometry.num_groups)]
        self._whole = whole
        self._fill = fill
        self._num_fragments = num_blocks * geometry.num_groups
        self._fragment = 0  # the next one
        self._start = 0  # of it, in `whole`
        self._received = 0  # bytes of it, as it travels
        self._announced: pb.EncodedFragment | None = None
        self._stored = bytearray()
        self.raw_bytes = self.encoded_bytes = 0  # of fragments that came encoded

    async def take(self, request: pb.PutRequest) -> None:
        """Take one message after the header."""
        if request.WhichOneof("part") == "encoded":
            self._announce(request.encoded)
            await self._chunk(memoryview(request.encoded.first_chunk))
        elif request.WhichOneof("part") == "chunk":
            await self._chunk(memoryview(request.chunk))
        else:
            raise error("BAD_REQUEST", "after the header a put has only chunks and encoded fragments")

    def finish(self) -> None:
        """The stream is over."""
        if self._fragment != self._num_fragments or self._received or self._announced is not None:
            raise error(
                "BAD_REQUEST",
                f"payload ends in fragment {self._fragment} of the {self._num_fragments} of the blocks named",
            )

    def _announce(self, announced: pb.EncodedFragment) -> None:
        if self._announced is not None or self._received or self._fragment >= self._num_fragments:
            raise error("BAD_REQUEST", "an encoded fragment begins where no fragment does")
        shape = self._shape
        if announced.codec not in usable_codecs():
            raise error("BAD_REQUEST", f"codec {announced.codec} is not one of put_codecs")
        if not 0 < announced.length <= shape.raw_bytes or len(announced.checksum) != CHECKSUM_BYTES:
            raise error("BAD_REQUEST", f"{announced.length} bytes for a fragment of {shape.raw_bytes}")
        self._announced, self._stored = announced, bytearray()

    async def _chunk(self, chunk: memoryview) -> None:
        while len(chunk):
            if self._fragment >= self._num_fragments:
                raise error("BAD_REQUEST", "more payload than the blocks named have")
            length = self._announced.length if self._announced is not None else self._shape.raw_bytes
            part = chunk[: length - self._received]
            self._fill(self._start + self._received + len(part))
            if self._announced is not None:
                self._stored += part
            else:
                start = self._start + self._received
                copy(self._whole[start : start + len(part)], part)
            self._received += len(part)
            chunk = chunk[len(part) :]
            if self._received == length:
                await self._end_fragment()

    async def _end_fragment(self) -> None:
        shape = self._shape
        if self._announced is not None:
            self._fill(self._start + shape.raw_bytes)
            into = self._whole[self._start : self._start + shape.raw_bytes]
            announced, stored = self._announced, memoryview(self._stored)
            decode = partial(decode_fragment, announced.codec, shape, stored, into, announced.checksum)
            is_right = (
                decode()
                if is_brief(announced.codec, shape, encodes=False)
                else await asyncio.to_thread(decode)
            )
            if not is_right:
                raise error("BAD_REQUEST", f"fragment {self._fragment} is not what its checksum says")
            self._announced = None
            self.raw_bytes += shape.raw_bytes
            self.encoded_bytes += len(stored)
        self._start += shape.raw_bytes
        self._fragment += 1
        self._received = 0

    @property
    def _shape(self) -> Shape:
        return self._shapes[self._fragment % len(self._shapes)]


def stream_codecs(settings: CompressionSettings, identity: NamespaceIdentity) -> Sequence[str]:
    """Return what the policy says of each layer group's fragments on their way over a network."""
    return [settings.codec_for(identity, group, "remote") for group in range(identity.geometry.num_groups)]
