"""Codecs of streams: fragments of streamed gets and puts that travel encoded, on the client's side.

    get: says which codecs it reads; what comes encoded is decoded into the caller's memory and compared
    put: the daemon said which codecs it reads and what its policy wants; `auto` is decided here, by what this
         connection takes and what encoding costs on this machine

The one place where a client uses the codecs, which live with the tiers: both ends have to mean the same
bytes. They are imported with the first stream, and only where numpy, xxhash and a codec's own library are
installed (pip install 'kvtier[codecs]'); without them everything travels as it is.
"""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...v1 import kvcache_pb2
from ...v1.types import Geometry
from ..memory.buffers import Blocks, scatter

if TYPE_CHECKING:
    from ...tiers.codecs.base import Shape
    from ...tiers.codecs.streaming import Encoded, StreamChoice, StreamEncoder

_MAX_AHEAD = 2  # fragments encoded, or being encoded, before they are sent


@cache
def _streaming() -> ModuleType | None:
    """Return what both ends share; None where something it needs is not installed."""
    try:
        from ...tiers.codecs import streaming
    except ImportError:
        return None
    return streaming


@cache
def readable_codecs() -> tuple[int, ...]:
    """Return the numbers of the codecs this client reads; empty without their libraries."""
    streaming = _streaming()
    return streaming.usable_codecs() if streaming is not None else ()


@cache
def _shape(geometry: Geometry, group: int) -> "Shape":
    from ...tiers.codecs.base import shape_of

    return shape_of(geometry, group)


class EncodedReader:
    """Collects the chunks of encoded fragments of one get, one fragment after the other."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._stored = bytearray()
        self._announced = kvcache_pb2.EncodedFragment()

    def take(self, message: kvcache_pb2.GetResponse) -> bool:
        """Take one chunk; whether it was the last of its fragment."""
        if not message.offset:
            self._stored = bytearray()
            self._announced = message.encoded
        raw_bytes = self._geometry.fragment_bytes[message.group]
        if message.offset == len(self._stored) and message.encoded.length <= raw_bytes:  # else not believed
            self._stored += message.chunk
        return bool(message.offset + len(message.chunk) >= message.encoded.length)

    def decode(self, group: int, target: npt.NDArray[np.int64]) -> bool:
        """Fill the pieces at `target` (addresses) from what was collected. Releases the GIL.

        Returns False when that is not what its checksum says; the pieces are then undefined.
        """
        streaming = _streaming()
        announced, stored = self._announced, self._stored
        if streaming is None or len(stored) != announced.length:
            return False
        shape = _shape(self._geometry, group)
        if len(target) == 1:
            into = memoryview((ctypes.c_char * shape.raw_bytes).from_address(int(target[0]))).cast("B")
        else:
            into = memoryview(bytearray(shape.raw_bytes))
        is_right: bool = streaming.decode_fragment(
            announced.codec, shape, memoryview(stored), into, announced.checksum
        )
        if is_right and len(target) > 1:
            scatter(target, len(into), 0, bytes(into))
        return is_right


@dataclass(slots=True)
class StreamCodecs:
    """What a connection's streamed puts may be encoded with. Belongs to an Attachment."""

    _encoder: "StreamEncoder | None" = None
    _names: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by namespace id, of each layer group
    _takes_first_chunks: bool = False

    def learn(self, told: kvcache_pb2.RegisterNamespaceResponse) -> None:
        """The daemon said, registering a namespace, which codecs it reads and what its policy is."""
        self._names[told.namespace_id] = tuple(told.stream_codecs) if told.put_codecs else ()
        self._takes_first_chunks = told.takes_first_chunks
        if self._encoder is None and set(told.put_codecs) & set(readable_codecs()):
            streaming = _streaming()
            assert streaming is not None, "there are codecs that can be read"
            self._encoder = streaming.StreamEncoder(list(told.put_codecs))

    def writer(self, geometry: Geometry, namespace_id: int, chunk_bytes: int) -> "EncodedWriter | None":
        """Return what streams the fragments of a put; None when there is nothing to encode with."""
        names = self._names.get(namespace_id, ())
        if self._encoder is None or len(names) != geometry.num_groups or set(names) == {"identity"}:
            return None
        return EncodedWriter(self._encoder, geometry, names, chunk_bytes, self._takes_first_chunks)


@dataclass(slots=True)
class EncodedWriter:
    """Streams the blocks of one put, fragment by fragment, encoded where that pays."""

    _encoder: "StreamEncoder"
    _geometry: Geometry
    _names: Sequence[str]  # of each layer group: a codec's, or `auto`
    _chunk_bytes: int
    _takes_first_chunks: bool

    def messages(self, blocks: Blocks) -> Iterator[kvcache_pb2.PutRequest]:
        """Yield what follows the header; what takes long to encode is encoded one fragment ahead."""
        streaming = _streaming()
        assert streaming is not None, "there is an encoder"
        meter = streaming.SendMeter()
        for (choice, _), many in groupby(self._travelling(blocks), lambda one: (one[1], one[2] is None)):
            waiting, num_bytes = list[memoryview](), 0  # what travels as it is shares messages
            for payload, _, encoded in many:
                waiting.append(payload)
                num_bytes += len(payload)
                if encoded is not None or num_bytes >= self._chunk_bytes:
                    yield from self._messages_of(waiting, encoded)
                    meter.sent(choice, num_bytes)
                    waiting, num_bytes = [], 0
            if waiting:
                yield from self._messages_of(waiting, None)
                meter.sent(choice, num_bytes)

    def _travelling(self, blocks: Blocks) -> "Iterator[tuple[memoryview, StreamChoice, Encoded | None]]":
        """Yield fragments in order, encoded where that pays."""
        streaming = _streaming()
        assert streaming is not None, "there is an encoder"
        ahead: deque[Future[tuple[memoryview, StreamChoice, Encoded | None]]] = deque()
        with ExitStack() as stack:
            thread: ThreadPoolExecutor | None = None
            for group, payload in self._fragments(blocks):
                shape = _shape(self._geometry, group)
                choice = self._encoder.choose(shape, self._names[group])
                if choice.codec is None or streaming.is_brief(choice.codec.codec_id, shape, encodes=True):
                    while ahead:
                        yield ahead.popleft().result()
                    yield self._encoded(shape, payload, choice)
                    continue
                thread = thread or stack.enter_context(ThreadPoolExecutor(1, "kvtier-encode"))
                ahead.append(thread.submit(self._encoded, shape, payload, choice))
                if len(ahead) >= _MAX_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _fragments(self, blocks: Blocks) -> Iterator[tuple[int, memoryview]]:
        for block in range(len(blocks)):
            payload = gathered(blocks.part(block, block + 1))
            start = 0
            for group, length in enumerate(self._geometry.fragment_bytes):
                yield group, payload[start : start + length]
                start += length

    def _messages_of(
        self, payloads: Sequence[memoryview], encoded: "Encoded | None"
    ) -> Iterator[kvcache_pb2.PutRequest]:
        travelling = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        first_bytes = 0
        if encoded is not None:
            travelling = encoded.stored
            first_bytes = self._chunk_bytes if self._takes_first_chunks else 0
            announced = kvcache_pb2.EncodedFragment(
                codec=encoded.codec_id,
                length=len(encoded.stored),
                checksum=encoded.checksum,
                first_chunk=encoded.stored[:first_bytes],
            )
            yield kvcache_pb2.PutRequest(encoded=announced)
        yield from chunks(travelling[first_bytes:], self._chunk_bytes)

    def _encoded(
        self, shape: "Shape", payload: memoryview, choice: "StreamChoice"
    ) -> "tuple[memoryview, StreamChoice, Encoded | None]":
        codec = choice.codec
        return payload, choice, None if codec is None else self._encoder.encode(codec, shape, payload)


def chunks(data: "memoryview | bytes", chunk_bytes: int) -> Iterator[kvcache_pb2.PutRequest]:
    """Yield the messages that carry `data` as it is."""
    for start in range(0, len(data), chunk_bytes):
        yield kvcache_pb2.PutRequest(chunk=bytes(data[start : start + chunk_bytes]))


def gathered(blocks: Blocks) -> memoryview:
    """Return the bytes of blocks in one piece, where they lie if they lie in one."""
    num_bytes = len(blocks) * blocks.block_bytes
    if blocks.address is not None or blocks.addresses.shape == (1, 1):
        address = int(blocks.addresses[0, 0])
        return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
    whole = bytearray(num_bytes)
    blocks.gather(ctypes.addressof(ctypes.c_char.from_buffer(whole)))
    return memoryview(whole)
