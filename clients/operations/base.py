"""Operations: what every call of the client does, once, for both shells. No sockets, no clock, no await.

Each method is a generator of effects (effects.py) that returns the call's result. Puts, gets and leases
have files of their own.
"""

import itertools
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...v1 import kvcache_pb2
from ...v1.addresses import default_target
from ...v1.arguments import instance, member, number, text, whole
from ...v1.conversions import identity_to_wire, urgency_to_wire
from ...v1.shm import HASH_BYTES
from ...v1.types import NamespaceIdentity, Tier, Urgency
from ..errors import CONNECTION_LOST, InvalidRequest, KvtierError
from ..options import DEFAULT_LIMITS, DEFAULT_RETRY, DEFAULT_TIMEOUT, Limits, Retry, Timeout
from ..values.keys import pack
from ..values.namespace import Namespace
from ..values.types import Prefetch, PrefillSpeed, Rank, ServerInfo
from .answers import num_blocks_of, rank_of
from .effects import Answer, Attach, Attachment, Forget, Operation, Post, Receive, Send

_LEAST_S, _DAY_S, _CENTURY_S = 0.001, 86_400.0, 100 * 366 * 86_400.0
_STALE = ("UNKNOWN_CLIENT", "UNKNOWN_NAMESPACE")  # the daemon was restarted, or gave us up


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client is told when it is made."""

    target: str
    name: str = ""
    domain: str = ""
    timeout: Timeout = DEFAULT_TIMEOUT
    retry: Retry = DEFAULT_RETRY
    limits: Limits = DEFAULT_LIMITS
    shared_memory: bool | None = None  # None: where the target allows it

    def __post_init__(self) -> None:
        for name in ("target", "name", "domain"):
            text(name, getattr(self, name))
        for name, kind in (("timeout", Timeout), ("retry", Retry), ("limits", Limits)):
            instance(name, getattr(self, name), kind)

    @classmethod
    def from_env(cls) -> "ClientSettings":
        """Read KVTIER_TARGET (or find the socket), KVTIER_NAME and KVTIER_DOMAIN."""
        return cls(
            target=default_target(os.environ),
            name=os.environ.get("KVTIER_NAME", ""),
            domain=os.environ.get("KVTIER_DOMAIN", ""),
        )


class Operations:
    """The simple calls, and the steps that all calls share."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------------------ shared steps

    def request_id(self) -> str:
        """Return an id that no other request of this client has."""
        return f"{self._prefix}-{next(self._numbers)}"

    def deadline(self, deadline_s: float | None) -> float:
        """Return how long a call may take, in seconds, at least a millisecond.

        Zero on the wire would mean the daemon's own limit; a call that is late already takes what is there.
        """
        wanted_s = self.settings.timeout.call_s if deadline_s is None else number("deadline_s", deadline_s)
        return min(max(wanted_s, _LEAST_S), _DAY_S)

    def should_repeat(self, problem: KvtierError, attempt: int) -> bool:
        """Return whether a call that failed in attempt number `attempt`, from 1, is made once more.

        It is made on a new connection. Silence is never tried again: the caller's time is spent.
        """
        if attempt >= self.settings.retry.num_attempts:
            return False
        return problem.reason == CONNECTION_LOST or problem.reason in _STALE

    def send(self, attachment: Attachment, call: str, request: Any, timeout_s: float) -> Operation[int]:
        """Report touches that wait, then start a call; return its ticket."""
        if attachment.touches.num_blocks:
            yield from self.flush(attachment)
        ticket: int = yield Send(call, request, timeout_s)
        return ticket

    def call(self, attachment: Attachment, call: str, request: Any) -> Operation[Any]:
        """Make a call with one answer, which may take the client's usual time; return its message."""
        ticket = yield from self.send(attachment, call, request, self.deadline(None))
        answer = yield from only_answer(ticket)
        return answer.message

    def flush(self, attachment: Attachment) -> Operation[None]:
        """Report blocks that were read one-sidedly."""
        if attachment.touches.num_blocks:
            limit = attachment.info.max_blocks_per_request * HASH_BYTES
            for namespace_id, session, packed in attachment.touches.take():
                for start in range(0, len(packed), limit):
                    request = kvcache_pb2.TouchRequest(
                        client_id=attachment.client_id,
                        namespace_id=namespace_id,
                        prefix_hashes=packed[start : start + limit],
                        session_id=session,
                    )
                    yield Post("Touch", request, is_hint=True)

    def begin(self, namespace: Namespace) -> Operation[tuple[Attachment, int]]:
        """Connect, and register the namespace when this connection has not done so; return its id."""
        instance("namespace", namespace, Namespace)
        attachment: Attachment = yield Attach()
        namespace_id = attachment.namespace_ids.get(namespace.digest)
        if namespace_id is None:
            response = yield from self._register(attachment, namespace.identity, namespace.prefill)
            namespace.id = namespace_id = response.namespace_id
            attachment.namespace_ids[namespace.digest] = namespace_id
        return attachment, namespace_id

    def chain(self, attachment: Attachment, hashes: Any) -> bytes:
        """Return `hashes` packed. Raises InvalidRequest when they are too many for one call."""
        packed = pack(hashes)
        limit = attachment.info.max_blocks_per_request
        if len(packed) > limit * HASH_BYTES:
            raise InvalidRequest(
                f"{len(packed) // HASH_BYTES} blocks in one call, limit {limit}; split the chain",
                reason="TOO_MANY_BLOCKS",
            )
        return packed

    # ------------------------------------------------------------------------------ simple calls

    def info(self) -> Operation[ServerInfo]:
        """Return version and limits of the daemon."""
        attachment: Attachment = yield Attach()
        return attachment.info

    def register(
        self, identity: NamespaceIdentity, prefill: PrefillSpeed | None = None
    ) -> Operation[Namespace]:
        """Return the namespace of an identity; see Client.register."""
        domain = self.settings.domain
        instance("identity", identity, NamespaceIdentity)
        if prefill is not None:
            instance("prefill", prefill, PrefillSpeed)
        if identity.domain not in ("", domain):
            raise InvalidRequest(
                f"the identity's domain is {identity.domain!r}, the client's is {domain!r}; "
                f"make a client with domain={identity.domain!r}",
                reason="BAD_NAMESPACE",
            )
        identity = replace(identity, domain=domain)
        attachment: Attachment = yield Attach()
        response = yield from self._register(attachment, identity, prefill)
        namespace = Namespace(identity, response.namespace_id, response.digest, prefill)
        if tuple(response.fragment_bytes) != namespace.fragment_bytes:
            raise InvalidRequest(
                f"daemon and client disagree on fragment sizes ({list(response.fragment_bytes)} and "
                f"{list(namespace.fragment_bytes)} bytes); use the same version on both sides",
                reason="LAYOUT_MISMATCH",
            )
        attachment.namespace_ids[namespace.digest] = namespace.id
        return namespace

    def rank(self, namespace: Namespace, hashes: Any, queues: dict[str, float] | None) -> Operation[Rank]:
        """Return the hosts of the fleet for a chain."""
        if queues is not None:
            instance("queues", queues, dict)
            for host, queue_s in queues.items():
                text("each host of queues", host)
                number("each of queues", queue_s, 0.0)
        attachment, namespace_id = yield from self.begin(namespace)
        packed = self.chain(attachment, hashes)
        if not packed:
            raise InvalidRequest("a prompt without blocks has no rank; name at least one", reason="BAD_KEY")
        candidates = [
            kvcache_pb2.RankCandidate(host=host, queue_s=queue_s) for host, queue_s in (queues or {}).items()
        ]
        request = kvcache_pb2.RankRequest(
            namespace_id=namespace_id, prefix_hashes=packed, candidates=candidates
        )
        response = yield from self.call(attachment, "Rank", request)
        return rank_of(response, len(packed) // HASH_BYTES)

    def pin(
        self, namespace: Namespace, hashes: Any, ttl_s: float, floor: Tier | str
    ) -> Operation[tuple[int, int]]:
        """Pin the stored prefix; return the id of the pin and the number of blocks."""
        attachment, namespace_id = yield from self.begin(namespace)
        request = kvcache_pb2.PinRequest(
            request_id=self.request_id(),
            client_id=attachment.client_id,
            namespace_id=namespace_id,
            prefix_hashes=self.chain(attachment, hashes),
            floor=attachment.tiers.number(floor),
            ttl_ms=milliseconds("ttl_s", ttl_s, 0.0),
        )
        response = yield from self.call(attachment, "Pin", request)
        return response.pin_id, num_blocks_of(response, len(request.prefix_hashes) // HASH_BYTES)

    def unpin(self, pin_id: int) -> Operation[None]:
        """End a pin."""
        attachment: Attachment = yield Attach()
        request = kvcache_pb2.UnpinRequest(pin_id=pin_id)
        yield from self.call(attachment, "Unpin", request)

    def prefetch(
        self, namespace: Namespace | None, hashes: Any, target: Tier | str, deadline_s: float | None
    ) -> Operation[Prefetch]:
        """Promote the stored prefix to `target`."""
        namespace_id = 0
        if namespace is None:
            attachment: Attachment = yield Attach()
        else:
            attachment, namespace_id = yield from self.begin(namespace)
        request = kvcache_pb2.PrefetchRequest(
            client_id=attachment.client_id,
            namespace_id=namespace_id,
            prefix_hashes=self.chain(attachment, hashes),
            target=attachment.tiers.number(target),
            deadline_ms=milliseconds("deadline_s", deadline_s),
        )
        response = yield from self.call(attachment, "Prefetch", request)
        num_blocks = num_blocks_of(response, len(request.prefix_hashes) // HASH_BYTES)
        return Prefetch(num_blocks, response.num_promoted)

    def update_session(
        self,
        session_id: str,
        urgency: Urgency,
        deadline_s: float | None = None,
        back_in_s: float | None = None,
        num_decoded_tokens: int = 0,
    ) -> Operation[None]:
        """Create a session or change it; see Session.update."""
        attachment: Attachment = yield Attach()
        request = kvcache_pb2.UpdateSessionRequest(
            client_id=attachment.client_id,
            session_id=text("session_id", session_id),
            urgency=urgency_to_wire(member("urgency", urgency, Urgency)),
            deadline_ms=milliseconds("deadline_s", deadline_s),
            back_in_ms=milliseconds("back_in_s", back_in_s),
            num_decoded_tokens=whole("num_decoded_tokens", num_decoded_tokens),
        )
        yield from self.call(attachment, "UpdateSession", request)

    def fork_session(self, session_id: str, new_session_id: str) -> Operation[int]:
        """Make a session that holds the blocks of another one; return how many."""
        attachment: Attachment = yield Attach()
        request = kvcache_pb2.ForkSessionRequest(
            client_id=attachment.client_id,
            session_id=text("session_id", session_id),
            new_session_id=text("new_session_id", new_session_id),
        )
        response = yield from self.call(attachment, "ForkSession", request)
        return int(response.num_blocks)

    def end_session(self, session_id: str, archive: bool, num_decoded_tokens: int = 0) -> Operation[int]:
        """End a session; return how many blocks are being archived."""
        attachment: Attachment = yield Attach()
        request = kvcache_pb2.EndSessionRequest(
            client_id=attachment.client_id,
            session_id=text("session_id", session_id),
            archive=bool(archive),
            num_decoded_tokens=whole("num_decoded_tokens", num_decoded_tokens),
        )
        response = yield from self.call(attachment, "EndSession", request)
        return int(response.num_archived)

    def touch(self) -> Operation[None]:
        """Report touches now."""
        attachment: Attachment = yield Attach()
        yield from self.flush(attachment)

    def leave(self) -> Operation[None]:
        """Report touches before the connection ends, if there is one: the last gets of a short life count."""
        attachment: Attachment | None = yield Attach(connect=False)
        if attachment is not None:
            yield from self.flush(attachment)

    def _register(
        self, attachment: Attachment, identity: NamespaceIdentity, prefill: PrefillSpeed | None
    ) -> Operation[Any]:
        request = kvcache_pb2.RegisterNamespaceRequest(
            identity=identity_to_wire(identity), prefill=prefill.to_wire() if prefill is not None else None
        )
        response = yield from self.call(attachment, "RegisterNamespace", request)
        attachment.streams.learn(response)
        return response


def only_answer(ticket: int) -> Operation[Answer]:
    """Wait for the one answer of a call; stop listening when the caller gives up."""
    try:
        answer: Answer = yield Receive(ticket)
    except KvtierError:
        raise
    except BaseException:
        with suppress(KvtierError):  # of a connection that ended meanwhile
            yield Forget(ticket)
        raise
    return answer


def milliseconds(name: str, value: float | None, least: float = float("-inf")) -> int:
    """Return a duration in seconds as it travels: in milliseconds, None as 0.

    Anything above zero is at least 1, and a century stands for ever. Raises InvalidRequest for what is no
    number of at least `least`.
    """
    seconds = 0.0 if value is None else number(name, value, least)
    return max(1, round(min(seconds, _CENTURY_S) * 1000)) if seconds > 0 else 0
