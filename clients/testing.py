"""FakeAppliance: a daemon inside the process, for tests of code that uses kvtier. No sockets, no files.

    appliance = FakeAppliance(capacity_bytes=1 << 20)
    with appliance.client() as client: ...

`client()` returns the real Client over a link that ends in this file, so its shape cannot differ; the
contract tests (tests/contracts/test_client.py) hold the answers to the daemon's. It evicts honestly when full
and fails on request: `fail_next`, `unavailable`, `restart`.

It has one tier, no shared index (no one-sided gets) and no clock of its own: give it one to let leases
expire.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..v1 import kvcache_pb2 as pb
from ..v1 import local_pb2
from ..v1.shm import HASH_BYTES
from .aio import AsyncClient
from .base import Settings
from .effects import Answer, Attachment
from .errors import (
    CONNECTION_LOST,
    NOT_RUNNING,
    InvalidRequest,
    KvtierError,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from .extents import U8, ExtentTable
from .fake_store import FakeStore, Key
from .namespace import Geometry
from .staging import StagingArea
from .sync import Client
from .words import PutOutcome, ServerInfo, Tier

_DRAM = Tier.DRAM.value


@dataclass(slots=True)
class _Hold:
    """A lease or a pin: blocks that are not evicted before `deadline_at`."""

    client_id: int  # 0 for a pin: it outlives its client
    keys: list[Key]
    deadline_at: float


@dataclass(slots=True)
class _Namespace:
    namespace_id: int
    digest: bytes
    fragment_bytes: list[int]


@dataclass(slots=True)
class _Books:
    """Everything that a restart forgets."""

    store: FakeStore
    epoch: int
    namespaces: dict[bytes, _Namespace] = field(default_factory=dict)
    holds: dict[int, _Hold] = field(default_factory=dict)
    sessions: dict[str, list[Key]] = field(default_factory=dict)


class FakeAppliance:
    """An in-process stand-in for the daemon. Not thread-safe beyond what Client serialises."""

    def __init__(
        self,
        capacity_bytes: int = 64 << 20,
        *,
        staging_bytes: int = 4 << 20,
        max_blocks_per_request: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.staging_bytes = staging_bytes
        self.max_blocks_per_request = max_blocks_per_request
        self.calls: list[str] = []  # names of all calls so far, for assertions
        self._unavailable = False
        self._numbers = itertools.count(1)
        self._failures: deque[KvtierError] = deque()
        self._links: list[_FakeLink] = []
        self._books = _Books(FakeStore(capacity_bytes), epoch=1)

    # --------------------------------------------------------------------------- for test authors

    def client(self, **settings: Any) -> Client:
        """Return a new Client of this appliance; `settings` as for Client (name, timeout, retry, ...)."""
        chosen = replace(Settings(), **settings)
        return Client.over(lambda: _FakeLink(self), chosen)

    def async_client(self, **settings: Any) -> AsyncClient:
        """Return a new AsyncClient of this appliance."""
        chosen = replace(Settings(), **settings)

        async def open_link() -> _AsyncFakeLink:
            return _AsyncFakeLink(self)

        return AsyncClient.over(open_link, chosen)

    def fail_next(self, problem: KvtierError, num_calls: int = 1) -> None:
        """Answer the next calls with `problem`."""
        self._failures.extend([problem] * num_calls)

    @property
    def unavailable(self) -> bool:
        """Whether nobody answers. Setting it breaks every connection."""
        return self._unavailable

    @unavailable.setter
    def unavailable(self, value: bool) -> None:
        self._unavailable = value
        if value:
            self._disconnect()

    def restart(self) -> None:
        """Forget everything, as a daemon without a cold store would, and start anew."""
        self._disconnect()
        self._books = _Books(FakeStore(self._books.store.capacity_bytes), self._books.epoch + 1)

    @property
    def num_blocks(self) -> int:
        """Blocks stored now."""
        return len(self._books.store.blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes stored now."""
        return self._books.store.used_bytes

    @property
    def num_evicted(self) -> int:
        """Blocks evicted so far."""
        return self._books.store.num_evicted

    def evict_all(self) -> int:
        """Evict what nobody holds; return how many blocks went."""
        before = self.num_evicted
        store = self._books.store
        store.make_room(store.capacity_bytes)
        return self.num_evicted - before

    def check_integrity(self) -> list[str]:
        """Audit the store, and that holds and blocks agree."""
        books = self._books
        problems = books.store.check_integrity()
        held: dict[Key, int] = {}
        for key in itertools.chain.from_iterable(hold.keys for hold in books.holds.values()):
            held[key] = held.get(key, 0) + 1
        for key, block in books.store.blocks.items():
            if block.num_holders != held.pop(key, 0):
                problems.append(f"block {key[1].hex()[:8]}: {block.num_holders} holders in the books")
        problems += [f"block {key[1].hex()[:8]} is held and not stored" for key in held]
        return problems

    # ------------------------------------------------------------------------------------- calls

    def _attach(self, link: "_FakeLink") -> Attachment:
        if self._unavailable:
            raise Unavailable("the fake appliance is switched off", reason=NOT_RUNNING)
        self._links.append(link)
        info = ServerInfo("fake", self._books.epoch, "fake", self.max_blocks_per_request)
        staging = StagingArea(np.zeros(self.staging_bytes, np.uint8))
        return Attachment(info, next(self._numbers), True, ExtentTable(0), staging)

    def _handle(self, attachment: Attachment, call: str, request: Any) -> Iterable[Answer]:
        self.calls.append(call)
        self._expire()
        if self._failures:
            raise self._failures.popleft()
        handler = getattr(self, f"_on_{''.join('_' + c.lower() if c.isupper() else c for c in call)[1:]}")
        answer = handler(attachment, request)
        return answer if isinstance(answer, list) else [Answer(answer)]

    def _on_map_extents(self, attachment: Attachment, request: Any) -> list[Answer]:
        extents = self._books.store.extents
        if any(number not in extents for number in request.extents):
            raise NotFound("no such extent", reason="UNKNOWN_EXTENT")
        memory = [extents[number] for number in request.extents]
        return [Answer(local_pb2.MapExtentsResponse(extents=request.extents), memory)]

    def _on_register_namespace(self, attachment: Attachment, request: Any) -> Any:
        wire = request.identity.SerializeToString(deterministic=True)
        shape = request.identity.geometry
        geometry = Geometry(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_tokens,
            shape.dtype,
            shape.layout,
            shape.layers_per_group,
            shape.num_planes or 2,
        )
        if geometry.block_bytes > self._books.store.capacity_bytes:
            raise PreconditionFailed("a block is larger than the appliance", reason="LAYOUT_MISMATCH")
        found = self._books.namespaces.get(wire)
        if found is None:
            number = len(self._books.namespaces) + 1
            digest = _sha256(wire)
            found = _Namespace(number, digest, list(geometry.fragment_bytes))
            self._books.namespaces[wire] = found
        return pb.RegisterNamespaceResponse(
            namespace_id=found.namespace_id,
            digest=found.digest,
            num_groups=len(found.fragment_bytes),
            fragment_bytes=found.fragment_bytes,
        )

    def _on_lookup(self, attachment: Attachment, request: Any) -> Any:
        keys = self._stored(request)
        return pb.LookupResponse(num_blocks=len(keys), tiers=bytes([_DRAM] * len(keys)), load_s=0.0)

    def _on_acquire(self, attachment: Attachment, request: Any) -> list[Answer]:
        keys = self._stored(request)
        ttl_s = request.ttl_ms / 1000 or 30.0
        wanted = keys[request.first_block :]
        lease_id = self._hold(attachment.client_id, wanted, ttl_s) if wanted else 0
        self._books.store.use(keys)
        self._remember(request.session_id, keys)
        groups = range(len(self._namespace(request.namespace_id).fragment_bytes) if wanted else 0)
        answers = []
        for group in groups:  # layer order: the first layers of all blocks come first
            ready = pb.Fragments()
            for block, key in enumerate(wanted, request.first_block):
                fragment = self._books.store.blocks[key].fragments[group]
                ready.block.append(block)
                ready.group.append(group)
                ready.extent.append(fragment.number)
                ready.offset.append(0)
                ready.length.append(fragment.length)
                ready.generation.append(int(fragment.header["generation"][0]))
            answers.append(pb.AcquireResponse(lease_id=lease_id, num_blocks=len(keys), ready=ready))
        answers = answers or [pb.AcquireResponse(num_blocks=len(keys))]
        answers[0].tiers = bytes([_DRAM] * len(keys))
        answers[-1].last = True
        return [Answer(answer) for answer in answers]

    def _on_release(self, attachment: Attachment, request: Any) -> Any:
        num_unknown = sum(not self._let_go(lease_id) for lease_id in request.lease_ids)
        return pb.ReleaseResponse(num_unknown=num_unknown)

    def _on_keep_alive(self, attachment: Attachment, request: Any) -> Any:
        expired = [lease_id for lease_id in request.lease_ids if lease_id not in self._books.holds]
        for lease_id in set(request.lease_ids) - set(expired):
            self._books.holds[lease_id].deadline_at = self.clock() + (request.ttl_ms / 1000 or 30.0)
        return pb.KeepAliveResponse(expired_lease_ids=expired)

    def _on_touch(self, attachment: Attachment, request: Any) -> Any:
        keys = [(request.namespace_id, one) for one in _split(request.prefix_hashes)]
        self._books.store.use(keys)
        return pb.TouchResponse()

    def _on_commit(self, attachment: Attachment, request: Any) -> Any:
        assert attachment.staging is not None
        header, memory = request.reserve, attachment.staging.memory
        namespace = self._namespace(header.namespace_id)
        parent = (header.namespace_id, header.parent_hash) if header.parent_hash else None
        outcomes = bytearray()
        for name, span in zip(_split(header.prefix_hashes), request.spans, strict=True):
            key = (header.namespace_id, name)
            payload = memory[span.offset : span.offset + span.length]
            if span.length != sum(namespace.fragment_bytes) or len(payload) != span.length:
                raise InvalidRequest("a span is not a block of the staging extent", reason="BAD_SPAN")
            outcomes.append(self._store(key, parent, payload, namespace.fragment_bytes))
            parent = key
        keys = [(header.namespace_id, name) for name in _split(header.prefix_hashes)]
        self._remember(header.session_id, [key for key in keys if key in self._books.store.blocks])
        return pb.CommitResponse(outcomes=bytes(outcomes))

    def _on_pin(self, attachment: Attachment, request: Any) -> Any:
        keys = self._stored(request)
        return pb.PinResponse(pin_id=self._hold(0, keys, request.ttl_ms / 1000), num_blocks=len(keys))

    def _on_unpin(self, attachment: Attachment, request: Any) -> Any:
        self._let_go(request.pin_id)
        return pb.UnpinResponse()

    def _on_prefetch(self, attachment: Attachment, request: Any) -> Any:
        return pb.PrefetchResponse(num_blocks=len(self._stored(request)), num_promoted=0)

    def _on_update_session(self, attachment: Attachment, request: Any) -> Any:
        created = request.session_id not in self._books.sessions
        self._books.sessions.setdefault(request.session_id, [])
        return pb.UpdateSessionResponse(created=created)

    def _on_fork_session(self, attachment: Attachment, request: Any) -> Any:
        if request.session_id not in self._books.sessions:
            return pb.ForkSessionResponse(num_blocks=0)
        keys = list(self._books.sessions[request.session_id])
        self._books.sessions[request.new_session_id] = keys
        return pb.ForkSessionResponse(num_blocks=sum(key in self._books.store.blocks for key in keys))

    def _on_end_session(self, attachment: Attachment, request: Any) -> Any:
        self._books.sessions.pop(request.session_id, None)
        return pb.EndSessionResponse(num_archived=0)  # there is no cold store here

    # --------------------------------------------------------------------------------- internals

    def _store(self, key: Key, parent: Key | None, payload: U8, fragment_bytes: list[int]) -> int:
        store = self._books.store
        if key in store.blocks:
            store.use([key])
            return PutOutcome.DEDUPLICATED
        if parent is not None and parent not in store.blocks:
            return PutOutcome.PARENT_MISSING
        stored = store.add(key, parent, payload, fragment_bytes)
        return PutOutcome.STORED if stored else PutOutcome.NO_ROOM

    def _stored(self, request: Any) -> list[Key]:
        self._namespace(request.namespace_id)
        return self._books.store.prefix(request.namespace_id, _split(request.prefix_hashes))

    def _namespace(self, namespace_id: int) -> _Namespace:
        for namespace in self._books.namespaces.values():
            if namespace.namespace_id == namespace_id:
                return namespace
        raise PreconditionFailed("register the namespace first", reason="UNKNOWN_NAMESPACE")

    def _remember(self, session_id: str, keys: list[Key]) -> None:
        if session_id:
            known = self._books.sessions.setdefault(session_id, [])
            known.extend(key for key in keys if key not in known)

    def _hold(self, client_id: int, keys: list[Key], ttl_s: float) -> int:
        number = next(self._numbers)
        self._books.holds[number] = _Hold(client_id, keys, self.clock() + ttl_s)
        for key in keys:
            self._books.store.blocks[key].num_holders += 1
        return number

    def _let_go(self, number: int) -> bool:
        hold = self._books.holds.pop(number, None)
        for key in hold.keys if hold else ():
            self._books.store.blocks[key].num_holders -= 1
        return hold is not None

    def _expire(self) -> None:
        now = self.clock()
        for number in [n for n, hold in self._books.holds.items() if hold.deadline_at <= now]:
            self._let_go(number)

    def _forget_client(self, link: "_FakeLink") -> None:
        self._links.remove(link)
        client_id = link.attachment.client_id
        for number in [n for n, hold in self._books.holds.items() if hold.client_id == client_id]:
            self._let_go(number)

    def _disconnect(self) -> None:
        for link in list(self._links):
            link.lose()


class _FakeLink:
    """A connection that answers at once. Implements Link."""

    def __init__(self, appliance: FakeAppliance) -> None:
        self.closed = False
        self._appliance = appliance
        self._tickets = itertools.count(1)
        self._answers: dict[int, deque[Answer | KvtierError]] = {}
        self.attachment = appliance._attach(self)
        self._is_lost = False

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        self._check()
        ticket = next(self._tickets)
        try:
            self._answers[ticket] = deque(self._appliance._handle(self.attachment, call, request))
        except KvtierError as problem:
            self._answers[ticket] = deque([problem])
        return ticket

    def receive(self, ticket: int) -> Answer:
        self._check()
        answer = self._answers[ticket].popleft()
        if isinstance(answer, KvtierError):
            raise answer
        return answer

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        self.forget(self.send(call, request, 0.0))

    def forget(self, ticket: int) -> None:
        self._answers.pop(ticket, None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._appliance._forget_client(self)

    def lose(self) -> None:
        """Break the connection from the other side; the client notices at its next call."""
        self._is_lost = True
        self._appliance._forget_client(self)

    def _check(self) -> None:
        if self._is_lost:
            self.closed = True
            raise Unavailable("the fake appliance went away", reason=CONNECTION_LOST)


class _AsyncFakeLink(_FakeLink):
    """The same for AsyncClient. Implements AsyncLink."""

    async def attach(self, settings: Settings) -> None:
        """Nothing to do: attached when made."""

    async def receive(self, ticket: int) -> Answer:  # type: ignore[override]
        return super().receive(ticket)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


def _split(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def _sha256(data: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(data).digest()
