"""Checks requests, answers them, and remembers them for retries; registers clients and namespaces.

Every request names a client, a namespace and a chain; what is wrong with them is said here once, with the
fix. A retry with the same request id finds the job of its first try here (invariant 9).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Protocol

from ....tiers.block import HASH_BYTES, NamespaceIdentity, tenant_of
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from ..encodings import Compression, NoCompression
from ..events import ClientOpened, NamespaceRegistered
from ..instructions import ForgetNamespace, Reply, StoreNamespace
from ..results import NamespaceResult, Refusal, Result
from ..secret_ids import permuted_32
from ..shares import Shares
from .leases import ClientEntry, LeaseTable
from .quotas import Quotas

IDLE_S = 600.0  # a namespace that no request named for so long may be emptied for another one
MAX_COMMON_ID = 1 << 24  # ids of namespaces that are drawn stand above it


class RememberedJob(Protocol):
    """A request that a retry with the same id finds again."""

    @property
    def is_done(self) -> bool:
        """Whether it was answered."""


class RequestRegistry:
    """Clients, namespaces, remembered requests, replies."""

    def __init__(self, core: CoreState, leases: LeaseTable, quotas: Quotas) -> None:
        self._core = core
        self.leases = leases
        self.quotas = quotas
        self._compression: Compression = NoCompression()
        self._domains: dict[str, int] = {}
        self._by_digest: dict[bytes, NamespaceEntry] = {}
        self._num_drawn = self._last_common_id = 0  # ids of namespaces
        #: Ids of an earlier daemon, which this one does not draw: one of them may name a forgotten namespace.
        self.former_ids: set[int] = set()
        self._shares = Shares(core.options.max_namespaces, core.options.num_tenants)
        #: Returns the namespaces that unfinished work names; set by the planner.
        self.namespaces_in_use: Callable[[], frozenset[int]] = frozenset
        #: Begins to erase the blocks of a namespace; set by Erasing.
        self.empty: Callable[[int], None] = lambda namespace_id: None
        self._requests: dict[int, OrderedDict[str, RememberedJob]] = {}  # by client

    # ------------------------------------------------------------------------------------- answers

    def reply(self, call: int, result: Result) -> None:
        """Answer a call."""
        self._core.outbox.emit(Reply(call, result))

    def refuse(self, call: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        """Answer a call with an operating error; `message` says the fix."""
        self._core.story.count(f"refused_{reason.lower()}")
        self.reply(call, Refusal(reason, message, retry_after_s))

    def check(
        self, call: int, client_id: int, namespace_id: int, prefix_hashes: Sequence[bytes]
    ) -> tuple[ClientEntry, NamespaceEntry] | None:
        """Return the client and namespace of a request, or refuse it."""
        client = self.client(client_id)
        if client is None:
            self.refuse(call, "UNKNOWN_CLIENT", "open the client (again); its time ran out or it never was")
            return None
        namespace = self._core.catalog.namespaces.get(namespace_id)
        if namespace is None or namespace.identity.domain != client.domain:
            refusal = unknown_namespace(namespace_id)
            self.refuse(call, refusal.reason, refusal.message)
            return None
        limit = self._core.options.max_blocks_per_request
        if len(prefix_hashes) > limit:
            message = f"{len(prefix_hashes)} blocks in one request; split it, limit {limit}"
            self.refuse(call, "TOO_MANY_BLOCKS", message)
            return None
        if prefix_hashes and set(map(len, prefix_hashes)) != {HASH_BYTES}:
            self.refuse(call, "BAD_KEY", f"prefix hashes are {HASH_BYTES} bytes each")
            return None
        namespace.used_at = self._core.now
        return client, namespace

    # ------------------------------------------------------------------------------------- clients

    def open_client(self, event: ClientOpened) -> None:
        """Make a client known."""
        now = self._core.now
        silent_at = now + event.ttl_s if event.ttl_s is not None else float("inf")
        self.leases.clients[event.client] = ClientEntry(
            event.client, event.name, event.local, event.domain, event.ttl_s, silent_at
        )
        self._requests[event.client] = OrderedDict()

    def client(self, client_id: int) -> ClientEntry | None:
        """Return a client that just said something, None when it is unknown."""
        client = self.leases.clients.get(client_id)
        self._core.asked_at = self._core.now
        if client is not None and client.ttl_s is not None:
            client.silent_at = self._core.now + client.ttl_s
        return client

    def is_open(self, client: ClientEntry) -> bool:
        """Whether a client is still there; unlike `client` this is not a sign of its life."""
        return self.leases.clients.get(client.id) is client

    def forget_client(self, client_id: int) -> None:
        """Forget the requests of a client that is gone."""
        self._requests.pop(client_id, None)

    def earlier(self, client: int, request_id: str) -> RememberedJob | None:
        """Return what an earlier try of the same request became."""
        return self._requests[client].get(request_id) if request_id and client in self._requests else None

    def remember(self, client: int, request_id: str, job: RememberedJob) -> None:
        """Let a later try of the same request find this job."""
        if request_id:
            requests = self._requests[client]
            requests[request_id] = job
            if len(requests) > self._core.options.max_remembered_requests:
                # Never one under way: its retry would be taken for another request. Rooms bound those.
                over = next((name for name, earlier in requests.items() if earlier.is_done), None)
                if over is not None:
                    del requests[over]

    def forget_request(self, client: int, request_id: str) -> None:
        """A later try of this request starts anew."""
        if client in self._requests:
            self._requests[client].pop(request_id, None)

    # ---------------------------------------------------------------------------------- namespaces

    def register(self, event: NamespaceRegistered) -> None:
        """Make a namespace known, or say why the tiers cannot hold it."""
        identity = event.identity
        namespace = self._by_digest.get(identity.digest)
        if namespace is None:
            largest = max(identity.geometry.fragment_bytes)
            for tier, room in self._core.rooms.items():
                if not room.can_hold(largest):
                    message = (
                        f"a fragment of {largest} bytes does not fit tier {tier.label}; "
                        "lower layers_per_group or raise the tier's extent (segment) size"
                    )
                    return self.refuse(event.call, "LAYOUT_MISMATCH", message)
            if not self._has_place(tenant := tenant_of(identity.domain)):
                self._empty_unused(tenant)
                message = (
                    f"max_namespaces: the tenant has {self._shares.held(tenant)} with blocks, its share of "
                    f"{self._core.options.max_namespaces}; ask again: one that was not used for {IDLE_S:g} s "
                    "is emptied; or use fewer"
                )
                return self.refuse(event.call, "TOO_MANY_NAMESPACES", message, 1.0)
            namespace = self.add_namespace(identity)
            if self._core.log is not None:
                self._core.outbox.emit(StoreNamespace(identity))
        namespace.used_at = self._core.now
        if event.prefill is not None:
            self._core.costs.state_speed(namespace.id, event.prefill)
        sizes = list(namespace.fragment_bytes)
        return self.reply(event.call, NamespaceResult(namespace.id, identity.digest, sizes))

    def compress(self, compression: Compression) -> None:
        """What enters the cold store from now on is encoded as `compression` says."""
        self._compression = compression
        for namespace in self._by_digest.values():
            self._encode(namespace)

    def _encode(self, namespace: NamespaceEntry) -> None:
        number_of = self._core.catalog.encodings.number_of
        identity = namespace.identity
        namespace.encodings = tuple(map(number_of, self._compression.encodings_of(identity)))
        namespace.exact_encodings = tuple(map(number_of, self._compression.exact_encodings_of(identity)))

    def options_changed(self) -> None:
        """Divide the limit among the tenants that there are now."""
        self._shares.resize(self._core.options.max_namespaces, self._core.options.num_tenants)

    def _has_place(self, tenant: str) -> bool:
        """Return whether a tenant may have one more namespace, after forgetting unused ones if need be:
        the tenant's own first, in the order in which they were registered. None is forgotten in vain."""
        shares = self._shares
        if shares.may_take(tenant, 1):
            return True
        own_first = sorted(self._by_digest.values(), key=lambda one: tenant_of(one.identity.domain) != tenant)
        to_forget: list[NamespaceEntry] = []
        for namespace in self.unused(own_first):
            shares.give(tenant_of(namespace.identity.domain), 1)
            to_forget.append(namespace)
            if is_enough := shares.may_take(tenant, 1):
                break
        else:
            is_enough = False
        for namespace in to_forget:
            shares.add(tenant_of(namespace.identity.domain), 1)
        for namespace in to_forget if is_enough else ():
            self.forget(namespace)
        return is_enough

    def _empty_unused(self, tenant: str) -> None:
        """Begin to empty the namespace of a tenant that was named longest ago, if that is long ago.

        Each sync of an engine's weights leaves one behind. Not one with pinned blocks."""
        core, in_use = self._core, self.namespaces_in_use()
        pinned = {core.catalog.namespace_id[row] for row in core.pin_floors}
        mine = [one for one in self._by_digest.values() if tenant_of(one.identity.domain) == tenant]
        for namespace in mine:
            namespace.used_at = namespace.used_at or core.now
        idle = [one for one in mine if one.id not in in_use and one.id not in pinned]
        oldest = min(idle, key=lambda one: one.used_at, default=None)
        if oldest is not None and core.now - oldest.used_at >= IDLE_S:
            self.empty(oldest.id)

    def unused(self, namespaces: Iterable[NamespaceEntry]) -> list[NamespaceEntry]:
        """Return those of these namespaces that have no blocks, and that no unfinished work names."""
        in_use = self.namespaces_in_use()
        return [one for one in namespaces if not one.rows and one.id not in in_use]

    def forget(self, namespace: NamespaceEntry) -> None:
        """Forget a namespace without blocks.

        Its id names no other one: a client that still has it is told to register again."""
        core, identity = self._core, namespace.identity
        core.catalog.remove_namespace(namespace)
        core.transitions.forget_namespace(namespace.id)
        core.costs.forget_namespace(namespace.id)
        del self._by_digest[identity.digest]
        self._shares.give(tenant_of(identity.domain), 1)
        core.story.count("namespaces_forgotten")
        if core.log is not None:
            core.outbox.emit(ForgetNamespace(identity))

    def _draw_id(self, domain: str) -> int:
        """Return an id that names no other namespace in this life. Those of the common domain are counted;
        others say nothing of how many there are, and come again only after four thousand million of them."""
        taken = self._core.catalog.namespaces.keys() | self.former_ids
        while True:
            if domain:
                self._num_drawn += 1
                number = permuted_32(self._num_drawn & 0xFFFF_FFFF, self._core.secret)
            else:
                number = self._last_common_id = self._last_common_id + 1
            if (number > MAX_COMMON_ID or not domain) and number not in taken:
                return number

    def add_namespace(self, identity: NamespaceIdentity, number: int = 0) -> NamespaceEntry:
        """Return the namespace of `identity`, added if need be, under the id `number` or (0) a new one."""
        namespace = self._by_digest.get(identity.digest)
        if namespace is None:
            domain = self.domain_number(identity.domain)
            if not identity.domain:
                self._last_common_id = max(self._last_common_id, number)
            number = number or self._draw_id(identity.domain)
            namespace = self._core.catalog.add_namespace(identity, domain, number)
            self._shares.add(tenant_of(identity.domain), 1)
            self._by_digest[identity.digest] = namespace
            self._encode(namespace)
            self._core.costs.add_namespace(namespace.id, identity.geometry)
        return namespace

    def domain_number(self, name: str) -> int:
        """Return the number that rooms know an isolation domain by: the same in every life of the daemon."""
        number = self._domains.get(name)
        if number is None:
            number = self._domains[name] = int.from_bytes(sha256(name.encode()).digest()[:7], "big")
            self.quotas.introduce(name, number)
        return number

    def forget_domains(self, names: Iterable[str]) -> None:
        """Forget domains without extents, as far as no namespace is in them: names do not pile up."""
        used = {namespace.domain for namespace in self._core.catalog.namespaces.values()}
        for name in names:
            if (number := self._domains.get(name)) is not None and number not in used:
                del self._domains[name]
                self.quotas.forget(number)


def unknown_namespace(namespace_id: int) -> Refusal:
    """Return the refusal of a namespace that is not registered (or of another domain's: the same words)."""
    return Refusal(
        "UNKNOWN_NAMESPACE", f"namespace {namespace_id} is not registered; register it, then retry"
    )
