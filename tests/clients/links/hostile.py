"""A daemon that answers every call, over the local channel or gRPC, and gets some of its answers wrong.

Right answers are those of a daemon with three blocks of two layer groups in memory, none of them in the
shared index, so that every get asks for them. `Mutations` decides by seed which ones are wrong, and how.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc

from kvtier.clients import Geometry, NamespaceIdentity
from kvtier.clients.errors import DETAIL_KEY
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import local_pb2, types_pb2
from kvtier.v1.local import Flag, Frame, Method, encode

from ..memory.mapped import EPOCH, EXTENT_BYTES, Memory, random_bytes
from .mutations import mutated, mutated_descriptors, mutated_frames
from .scripted import Connection, ScriptedServer

GEOMETRY = Geometry(
    num_layers=2, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=1
)
IDENTITY = NamespaceIdentity(bytes(16), GEOMETRY)
NAMES = [bytes([number]) * 32 for number in range(1, 5)]  # the last one is not stored
NUM_STORED = 3
FRAGMENT_BYTES = GEOMETRY.fragment_bytes
PAYLOADS = [random_bytes(GEOMETRY.block_bytes, number) for number in range(NUM_STORED)]
EMPTY_DOMAIN = 1  # its index names no block
_CALLS = [method for method in Method if not method.name.endswith("_PAGES")]
_SHARE = 0.3  # of answers that are wrong


def call_of(method: Method) -> str:
    """Return a call's name in the .proto files."""
    return "".join(part.capitalize() for part in method.name.split("_"))


def right_answers(call: str, request: Any) -> list[Any]:
    """Return the messages of a working daemon; those of Acquire lack the fragments."""
    num_named = len(request.prefix_hashes) // 32 if hasattr(request, "prefix_hashes") else 0
    num_found = min(num_named, NUM_STORED)
    match call:
        case "GetServerInfo":
            return [pb.GetServerInfoResponse(version="hostile", epoch=EPOCH, max_blocks_per_request=64)]
        case "OpenClient":
            return [pb.OpenClientResponse(client_id=1, ttl_ms=60_000)]
        case "RegisterNamespace":
            return [
                pb.RegisterNamespaceResponse(
                    namespace_id=1, digest=bytes(32), num_groups=2, fragment_bytes=FRAGMENT_BYTES
                )
            ]
        case "Lookup":
            return [pb.LookupResponse(num_blocks=num_found, tiers=bytes([2]) * num_found)]
        case "Acquire":
            tiers = bytes([2]) * num_found
            first = pb.AcquireResponse(lease_id=5, num_blocks=num_found, tiers=tiers, num_stored=num_found)
            return [first, pb.AcquireResponse(lease_id=5, num_blocks=num_found, last=True)]
        case "Get":
            return list(_chunks(request.acquire))
        case "Commit" | "Put":
            header = request.reserve if call == "Commit" else request.header
            return [getattr(pb, f"{call}Response")(outcomes=bytes([2]) * (len(header.prefix_hashes) // 32))]
        case "Pin" | "Prefetch":
            return [getattr(pb, f"{call}Response")(num_blocks=num_found)]
        case "Rank":
            told = pb.RankedHost(
                address="a:1",
                is_known=True,
                num_held=num_found,
                num_in_memory=num_found,
                num_computed=num_named - num_found,
            )
            return [pb.RankResponse(hosts=[told])]
        case _:
            return [getattr(pb, f"{call}Response")()]


def _chunks(request: Any) -> Iterator[Any]:
    num_found = min(len(request.prefix_hashes) // 32, NUM_STORED)
    for block in range(request.first_block, num_found):
        if block % 2:  # its fragments share a message
            yield pb.GetResponse(block=block, chunk=PAYLOADS[block], more_blocks=[block], more_groups=[1])
            continue
        for group, length in enumerate(FRAGMENT_BYTES):
            payload = PAYLOADS[block][group * length : (group + 1) * length]
            for start in range(0, length, 10_000):
                yield pb.GetResponse(
                    block=block, group=group, offset=start, chunk=payload[start : start + 10_000]
                )
    yield pb.GetResponse(num_blocks=num_found, last=True)


class Mutations:
    """Which answers of one seed are wrong: each call's n-th has a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counts: Counter[str] = Counter()

    def of(self, call: str) -> Random | None:
        """Return what to mutate the next answer to `call` with; None when it is to be right."""
        self._counts[call] += 1
        random = Random(f"{self._seed} {call} {self._counts[call]}")
        return random if random.random() < _SHARE else None


class HostileLocal(ScriptedServer):
    """The local channel. `mutations` may be replaced between clients."""

    def __init__(self, path: Path) -> None:
        memory = Memory()
        super().__init__(path, memory)
        self.mutations = Mutations(0)
        self.places = [
            [
                memory.store(name, payload[g * size : (g + 1) * size], group=g)
                for g, size in enumerate(FRAGMENT_BYTES)
            ]
            for name, payload in zip(NAMES, PAYLOADS, strict=False)
        ]
        self.handlers = dict.fromkeys(_CALLS, self._answer)

    def close(self) -> None:
        super().close()
        self.memory.close()

    def _answer(self, connection: Connection, frame: Frame) -> None:
        if frame.flags & Flag.NO_REPLY:
            return
        call = call_of(frame.method)
        module = local_pb2 if hasattr(local_pb2, f"{call}Request") else pb
        request = getattr(module, f"{call}Request").FromString(frame.payload)
        for message, descriptors in self._messages(connection, call, request):
            random = self.mutations.of(call)
            self._send(connection.socket, frame, message, descriptors, random)

    def _messages(self, connection: Connection, call: str, request: Any) -> Iterator[tuple[Any, list[int]]]:
        if call == "Attach":
            response = local_pb2.AttachResponse(
                client_id=1,
                epoch=EPOCH,
                staging_bytes=connection.staging.num_bytes,
                extent_bytes=EXTENT_BYTES,
                version="hostile",
                max_blocks_per_request=64,
            )
            index = self.memory.indexes.of(EMPTY_DOMAIN).descriptor
            yield response, self.right_descriptors(call, [connection.staging.descriptor, index])
        elif call == "MapExtents":
            known = [number for number in request.extents if number < self.memory.engine.num_extents]
            descriptors = [self.memory.engine.descriptor(number) for number in known]
            yield local_pb2.MapExtentsResponse(extents=known), self.right_descriptors(call, descriptors)
        else:
            answers = right_answers(call, request)
            if call == "Acquire":
                answers[-1].ready.CopyFrom(self.ready(request.first_block, answers[-1].num_blocks))
            yield from ((answer, []) for answer in answers)

    def right_descriptors(self, call: str, descriptors: list[int]) -> list[int]:
        """Return what is sent with an answer that is not mutated; a test may replace it."""
        return descriptors

    def ready(self, first_block: int, num_blocks: int) -> pb.Fragments:
        """Return where the fragments of these blocks are."""
        ready = pb.Fragments()
        for block in range(first_block, num_blocks):
            for group, place in enumerate(self.places[block]):
                extent, offset, generation = self.memory.engine.location(place)
                ready.block.append(block)
                ready.group.append(group)
                ready.extent.append(extent)
                ready.offset.append(offset)
                ready.length.append(FRAGMENT_BYTES[group])
                ready.generation.append(generation)
        return ready

    @staticmethod
    def _send(
        peer: socket.socket, frame: Frame, message: Any, descriptors: list[int], random: Random | None
    ) -> None:
        is_last = getattr(message, "last", True)
        answer = Frame(
            frame.method, Flag.LAST if is_last else Flag.NONE, frame.call, message.SerializeToString()
        )
        made: list[int] = []
        data = encode(answer)
        if random is not None and descriptors and random.randrange(2):
            made = descriptors = mutated_descriptors(len(descriptors), random)
        elif random is not None and random.randrange(2):
            data = mutated_frames(answer, random)
        elif random is not None:
            data = encode(answer._replace(payload=mutated(message, random)))
        socket.send_fds(peer, [data], descriptors)
        for one in made:
            os.close(one)


@contextmanager
def hostile_local(folder: Path) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Yield a target and a function that sets the seed."""
    server = HostileLocal(folder / "kvtier.sock.local")
    try:
        yield f"unix://{folder}/kvtier.sock", lambda seed: setattr(server, "mutations", Mutations(seed))
    finally:
        server.close()


class HostileGrpc(grpc.GenericRpcHandler):
    """KVCacheService, with payloads that are made here and never serialized by gRPC."""

    def __init__(self) -> None:
        self.mutations = Mutations(0)

    def service(self, details: Any) -> Any:
        """Return the handler of a call."""
        call = details.method.rpartition("/")[2]
        parse = getattr(pb, f"{call}Request").FromString
        if call in ("Acquire", "Get"):
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: self._answers(call, request, context), parse
            )
        if call == "Put":
            return grpc.stream_unary_rpc_method_handler(
                lambda requests, context: next(self._answers(call, next(iter(requests)), context)), parse
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: next(self._answers(call, request, context)), parse
        )

    def _answers(self, call: str, request: Any, context: Any) -> Iterator[bytes]:
        for message in right_answers(call, request):
            random = self.mutations.of(call)
            if random is not None and not random.randrange(4):
                detail = mutated(types_pb2.ErrorDetail(code=5, reason="NO", message="no"), random)
                context.set_trailing_metadata(((DETAIL_KEY, detail),))
                context.abort(random.choice(list(grpc.StatusCode)[1:]), "no")
            yield message.SerializeToString() if random is None else mutated(message, random)


@contextmanager
def hostile_grpc(folder: Path) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Yield a target and a function that sets the seed."""
    handler = HostileGrpc()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", lambda seed: setattr(handler, "mutations", Mutations(seed))
    finally:
        server.stop(grace=None).wait()
