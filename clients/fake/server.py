"""FakeServer: the calls of KVCacheService as FakeAppliance answers them, at once and in this thread.

The smallest thing that honours the contract: one tier, leases and pins that protect, sessions that are
remembered, leaf-first LRU. What is stored is in store.py.
"""

import itertools
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...v1 import kvcache_pb2 as pb
from ...v1 import local_pb2
from ...v1.conversions import STANDARD_WIRE, identity_from_wire
from ...v1.shm import HASH_BYTES
from ...v1.types import PutOutcome, Tier
from ..errors import InvalidRequest, KvtierError, NotFound, PreconditionFailed
from ..memory.extents import U8, ExtentTable
from ..memory.staging import StagingArea
from ..operations.effects import Answer, Attachment
from ..values.types import ServerInfo
from .store import FakeStore, Key

FAKE_HOST = "fake"  # what it is called in a ranking
COMPUTE_S = 0.01  # of a block
_DRAM = STANDARD_WIRE.number(Tier.DRAM)


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
    block_tokens: int


@dataclass(slots=True)
class FakeState:
    """Everything that a restart forgets."""

    store: FakeStore
    epoch: int
    namespaces: dict[bytes, _Namespace] = field(default_factory=dict)
    holds: dict[int, _Hold] = field(default_factory=dict)
    sessions: dict[str, list[Key]] = field(default_factory=dict)


class FakeServer:
    """Answers requests of attached clients. `fail` holds errors that the next calls get instead."""

    def __init__(
        self, capacity_bytes: int, staging_bytes: int, max_blocks_per_request: int, clock: Callable[[], float]
    ) -> None:
        self.clock = clock
        self.staging_bytes = staging_bytes
        self.max_blocks_per_request = max_blocks_per_request
        self.calls: list[str] = []
        self.failures: deque[KvtierError | None] = deque()  # of the next calls; None: that one succeeds
        self.state = FakeState(FakeStore(capacity_bytes), epoch=1)
        self.lock = threading.RLock()  # clients are used on several threads; a call is answered whole
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------------------------- calls

    def attach(self) -> Attachment:
        """Return a new client's connection."""
        staging = StagingArea(np.zeros(self.staging_bytes, np.uint8))
        with self.lock:
            info = ServerInfo("fake", self.state.epoch, "fake", self.max_blocks_per_request)
            return Attachment(info, next(self._numbers), True, ExtentTable(0), staging)

    def detach(self, client_id: int) -> None:
        """Give back what a client holds."""
        with self.lock:
            for number in [n for n, hold in self.state.holds.items() if hold.client_id == client_id]:
                self.let_go(number)

    def restart(self) -> None:
        """Forget everything."""
        with self.lock:
            self.state = FakeState(FakeStore(self.state.store.capacity_bytes), self.state.epoch + 1)

    def check_integrity(self) -> list[str]:
        """Audit the store, and that holds and blocks agree."""
        with self.lock:
            return self._audit(self.state)

    @staticmethod
    def _audit(state: FakeState) -> list[str]:
        problems = state.store.check_integrity()
        held: dict[Key, int] = {}
        for key in itertools.chain.from_iterable(hold.keys for hold in state.holds.values()):
            held[key] = held.get(key, 0) + 1
        for key, block in state.store.blocks.items():
            if block.num_holders != held.pop(key, 0):
                problems.append(f"block {key[1].hex()[:8]}: {block.num_holders} holders in the state")
        problems += [f"block {key[1].hex()[:8]} is held and not stored" for key in held]
        return problems

    def handle(self, attachment: Attachment, call: str, request: Any) -> list[Answer]:
        """Answer one call. Raises KvtierError as a daemon would."""
        handler = getattr(self, "_on" + re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", call))
        with self.lock:
            self.calls.append(call)
            self.expire()
            if self.failures and (problem := self.failures.popleft()):
                raise problem
            answer = handler(attachment, request)
        return answer if isinstance(answer, list) else [Answer(answer)]

    def _on_map_extents(self, attachment: Attachment, request: Any) -> list[Answer]:
        extents = self.state.store.extents
        if any(number not in extents for number in request.extents):
            raise NotFound("no such extent", reason="UNKNOWN_EXTENT")
        memory = [extents[number] for number in request.extents]
        return [Answer(local_pb2.MapExtentsResponse(extents=request.extents), memory)]

    def _on_register_namespace(self, attachment: Attachment, request: Any) -> Any:
        identity = identity_from_wire(request.identity, request.identity.domain)
        geometry = identity.geometry
        if geometry.block_bytes > self.state.store.capacity_bytes:
            raise PreconditionFailed("a block is larger than the appliance", reason="LAYOUT_MISMATCH")
        found = self.state.namespaces.get(identity.digest)
        if found is None:
            number = len(self.state.namespaces) + 1
            found = _Namespace(number, identity.digest, list(geometry.fragment_bytes), geometry.block_tokens)
            self.state.namespaces[identity.digest] = found
        return pb.RegisterNamespaceResponse(
            namespace_id=found.namespace_id,
            digest=found.digest,
            num_groups=len(found.fragment_bytes),
            fragment_bytes=found.fragment_bytes,
        )

    def _on_lookup(self, attachment: Attachment, request: Any) -> Any:
        keys = self._stored(request)
        tiers = bytes([_DRAM] * len(keys))  # one tier, always worth loading
        return pb.LookupResponse(num_blocks=len(keys), tiers=tiers, num_worth_loading=len(keys))

    def _on_rank(self, attachment: Attachment, request: Any) -> Any:
        """The fake is a fleet of itself; other candidates are hosts of which it knows nothing."""
        num_held, num_blocks = len(self._stored(request)), len(_split(request.prefix_hashes))
        queues = {one.host: one.queue_s for one in request.candidates} or {FAKE_HOST: 0.0}
        hosts = []
        for host, queue_s in queues.items():
            held = num_held if host == FAKE_HOST else 0
            told = pb.RankedHost(address=host, queue_s=queue_s, num_held=held, num_in_memory=held)
            told.name, told.is_self = (host, True) if host == FAKE_HOST else ("", False)
            told.is_known, told.num_computed = told.is_self, num_blocks - held
            told.compute_s = COMPUTE_S * told.num_computed
            told.first_token_s = queue_s + told.compute_s
            hosts.append(told)
        hosts.sort(key=lambda one: one.first_token_s)
        namespace = self._namespace(request.namespace_id)
        return pb.RankResponse(
            hosts=hosts,
            num_blocks=num_blocks,
            block_tokens=namespace.block_tokens,
            recompute_s=COMPUTE_S * num_blocks,
            is_guess=True,
        )

    def _on_acquire(self, attachment: Attachment, request: Any) -> list[Answer]:
        keys = self._stored(request)
        ttl_s = request.ttl_ms / 1000 or 30.0
        wanted = keys[request.first_block :]
        lease_id = self._hold(attachment.client_id, wanted, ttl_s) if wanted else 0
        self.state.store.use(keys)
        self._remember(request.session_id, keys)
        groups = range(len(self._namespace(request.namespace_id).fragment_bytes) if wanted else 0)
        answers = []
        for group in groups:  # layer order: the first layers of all blocks come first
            ready = pb.Fragments()
            for block, key in enumerate(wanted, request.first_block):
                fragment = self.state.store.blocks[key].fragments[group]
                ready.block.append(block)
                ready.group.append(group)
                ready.extent.append(fragment.number)
                ready.offset.append(0)
                ready.length.append(fragment.length)
                ready.generation.append(int(fragment.header["generation"][0]))
            answers.append(pb.AcquireResponse(lease_id=lease_id, num_blocks=len(keys), ready=ready))
        answers = answers or [pb.AcquireResponse(num_blocks=len(keys))]
        answers[0].tiers = bytes([_DRAM] * len(keys))
        answers[0].num_stored = len(keys)
        answers[-1].last = True
        return [Answer(answer) for answer in answers]

    def _on_release(self, attachment: Attachment, request: Any) -> Any:
        num_unknown = sum(not self.let_go(lease_id) for lease_id in request.lease_ids)
        return pb.ReleaseResponse(num_unknown=num_unknown)

    def _on_keep_alive(self, attachment: Attachment, request: Any) -> Any:
        expired = [lease_id for lease_id in request.lease_ids if lease_id not in self.state.holds]
        for lease_id in set(request.lease_ids) - set(expired):
            self.state.holds[lease_id].deadline_at = self.clock() + (request.ttl_ms / 1000 or 30.0)
        return pb.KeepAliveResponse(expired_lease_ids=expired)

    def _on_touch(self, attachment: Attachment, request: Any) -> Any:
        keys = [(request.namespace_id, one) for one in _split(request.prefix_hashes)]
        self.state.store.use(keys)
        return pb.TouchResponse()

    def _on_commit(self, attachment: Attachment, request: Any) -> Any:
        assert attachment.staging is not None
        header, memory = request.reserve, attachment.staging.memory
        namespace = self._namespace(header.namespace_id)
        parent = (header.namespace_id, header.parent_hash) if header.parent_hash else None
        outcomes = bytearray()
        names, block_bytes = _split(header.prefix_hashes), sum(namespace.fragment_bytes)
        num_bytes = sum(span.length for span in request.spans)
        if num_bytes != len(names) * block_bytes or any(
            s.offset + s.length > len(memory) for s in request.spans
        ):
            raise InvalidRequest("the spans are not the blocks in the staging extent", reason="BAD_SPAN")
        starts = [
            span.offset + skipped for span in request.spans for skipped in range(0, span.length, block_bytes)
        ]
        for name, start in zip(names, starts, strict=True):
            key = (header.namespace_id, name)
            payload = memory[start : start + block_bytes]
            outcomes.append(self._store(key, parent, payload, namespace.fragment_bytes))
            parent = key
        keys = [(header.namespace_id, name) for name in _split(header.prefix_hashes)]
        self._remember(header.session_id, [key for key in keys if key in self.state.store.blocks])
        return pb.CommitResponse(outcomes=bytes(outcomes))

    def _on_pin(self, attachment: Attachment, request: Any) -> Any:
        keys = self._stored(request)
        return pb.PinResponse(pin_id=self._hold(0, keys, request.ttl_ms / 1000), num_blocks=len(keys))

    def _on_unpin(self, attachment: Attachment, request: Any) -> Any:
        self.let_go(request.pin_id)
        return pb.UnpinResponse()

    def _on_prefetch(self, attachment: Attachment, request: Any) -> Any:
        if request.namespace_id:
            return pb.PrefetchResponse(num_blocks=len(self._stored(request)))
        names, store = _split(request.prefix_hashes), self.state.store
        found = [store.prefix(one.namespace_id, names) for one in self.state.namespaces.values()]
        return pb.PrefetchResponse(num_blocks=max(map(len, found), default=0))

    def _on_update_session(self, attachment: Attachment, request: Any) -> Any:
        created = request.session_id not in self.state.sessions
        self.state.sessions.setdefault(request.session_id, [])
        return pb.UpdateSessionResponse(created=created)

    def _on_fork_session(self, attachment: Attachment, request: Any) -> Any:
        if request.session_id not in self.state.sessions:
            return pb.ForkSessionResponse(num_blocks=0)
        keys = list(self.state.sessions[request.session_id])
        self.state.sessions[request.new_session_id] = keys
        return pb.ForkSessionResponse(num_blocks=sum(key in self.state.store.blocks for key in keys))

    def _on_end_session(self, attachment: Attachment, request: Any) -> Any:
        self.state.sessions.pop(request.session_id, None)
        return pb.EndSessionResponse(num_archived=0)  # there is no cold store here

    # --------------------------------------------------------------------------------- internals

    def _store(self, key: Key, parent: Key | None, payload: U8, fragment_bytes: list[int]) -> int:
        store = self.state.store
        if key in store.blocks:
            store.use([key])
            return PutOutcome.DEDUPLICATED
        if parent is not None and parent not in store.blocks:
            return PutOutcome.PARENT_MISSING
        stored = store.add(key, parent, payload, fragment_bytes)
        return PutOutcome.STORED if stored else PutOutcome.NO_ROOM

    def _stored(self, request: Any) -> list[Key]:
        self._namespace(request.namespace_id)
        return self.state.store.prefix(request.namespace_id, _split(request.prefix_hashes))

    def _namespace(self, namespace_id: int) -> _Namespace:
        for namespace in self.state.namespaces.values():
            if namespace.namespace_id == namespace_id:
                return namespace
        raise PreconditionFailed("register the namespace first", reason="UNKNOWN_NAMESPACE")

    def _remember(self, session_id: str, keys: list[Key]) -> None:
        if session_id:
            known = self.state.sessions.setdefault(session_id, [])
            known.extend(key for key in keys if key not in known)

    def _hold(self, client_id: int, keys: list[Key], ttl_s: float) -> int:
        number = next(self._numbers)
        self.state.holds[number] = _Hold(client_id, keys, self.clock() + ttl_s)
        for key in keys:
            self.state.store.blocks[key].num_holders += 1
        return number

    def let_go(self, number: int) -> bool:
        """End a lease or pin; False when it is unknown."""
        hold = self.state.holds.pop(number, None)
        for key in hold.keys if hold else ():
            self.state.store.blocks[key].num_holders -= 1
        return hold is not None

    def expire(self) -> None:
        """End what is held beyond its deadline."""
        now = self.clock()
        for number in [n for n, hold in self.state.holds.items() if hold.deadline_at <= now]:
            self.let_go(number)


def _split(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
