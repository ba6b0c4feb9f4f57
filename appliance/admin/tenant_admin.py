"""What an administrator asks of tenants that is no setting: to erase one, and what each of them takes.

Erasing has an order that a crash cannot upset. First an object store that hosts share loses the tenant's key
and bundles: what another host could still read. A store that does not answer keeps no host from erasing; the
administrator is told. Then kept memory says that no later daemon takes anything of
the tenant over. Then the key is destroyed, durably: from then on nothing that lies on the device can be read,
whatever becomes of this process. Then the planner forgets the tenant's blocks, in memory and in the catalog,
and lets nothing land that was on its way. When nothing is on its way any more, the tenant may have another
key, and the administrator gets an answer.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from ...sources.objects.problems import StoreError
from ...tiers.base import CopyError
from ...tiers.block import tenant_of
from ...tiers.cold.engine import ColdStore
from ...v1 import admin_pb2 as pb
from ..appliance import Appliance
from ..config import COMMON, Tenant, domain_named
from ..core.events import TenantErased
from ..core.results import CountResult
from ..errors import disk_error, error
from ..persisted.namespace_book import NamespaceBook
from ..tasks import Tasks
from ..transfer.object_edge import ObjectEdge

log = logging.getLogger(__name__)


class TenantAdmin:
    """Lists and erases tenants. Owned by the event loop. `tenants`: those of the policy in force."""

    def __init__(
        self,
        appliance: Appliance,
        tenants: Callable[[], Mapping[str, Tenant]],
        book: NamespaceBook | None,
    ) -> None:
        self._appliance = appliance
        self._planner = appliance.planner
        self._tenants = tenants
        self._book = book
        self.source: ObjectEdge | None = None  # an object store, where there is one
        self._erasing: Tasks[pb.EraseTenantResponse] = Tasks()
        self._turn = asyncio.Lock()

    async def erase(self, name: str) -> pb.EraseTenantResponse:
        """Make everything unreadable that a tenant ever stored, here and after any restart. Idempotent.

        Goes on when its caller does not wait. Raises ApplianceError: BAD_REQUEST, NOTHING_THERE,
        NOT_ENCRYPTED; TIER_FULL or DISK_FAILED where the key file could not be replaced: nothing has changed
        on this host. SOURCE_FAILED when everything is erased but what an object store has.
        """
        tenant = self._domain(name)
        if tenant not in self._known():
            message = f"nothing is known of {name}; `kvtier tenant list` lists what is known"
            raise error("NOTHING_THERE", message)
        store = self._appliance.engines.get(self._planner.core.ladder.log_tier)
        if isinstance(store, ColdStore) and not store.is_encrypted:
            message = (
                "nothing is encrypted, so no key can be destroyed: what this tenant stored lies readable in "
                "the segments; set encryption.master_key for what is to come"
            )
            raise error("NOT_ENCRYPTED", message)
        work = self._erase(tenant, store if isinstance(store, ColdStore) else None)
        return await asyncio.shield(self._erasing.start(work))

    async def _erase(self, tenant: str, store: ColdStore | None) -> pb.EraseTenantResponse:
        async with self._turn:  # a second call destroys the key that the first one allowed
            source = self.source
            if source is None:
                return await self._erase_here(tenant, store)
            source.bar(tenant)
            failure = done = ""
            try:
                try:
                    num_bundles = await source.erase(tenant)
                    done = f"in {source.status().address} its key is gone, {num_bundles} bundles are deleted"
                    log.info("erasing %s: %s", tenant or COMMON, done)
                except StoreError as problem:
                    failure = str(problem)
                answer = await self._erase_here(tenant, store, done)
            finally:
                source.admit(tenant)
        if failure:
            address, name = source.status().address, tenant or COMMON
            again = f"`kvtier objects erase-tenant {address} {name}` when it answers"
            raise error("SOURCE_FAILED", f"{name} is erased here, not in {address}: {failure}; {again}")
        return answer

    async def _erase_here(
        self, tenant: str, store: ColdStore | None, done: str = ""
    ) -> pb.EraseTenantResponse:
        """`done`: what an error says of the object store."""
        had_key = False
        if self._book is not None:
            self._book.erase(tenant)
        if store is not None:
            try:
                had_key = await self._appliance.keep_store(lambda: store.erase_tenant(tenant))
            except CopyError as problem:
                self._admit(tenant)
                erased = f"{done}; nothing is erased on this host" if done else "nothing is erased"
                raise disk_error(problem, erased) from problem
        answer = self._appliance.ask(lambda call: TenantErased(call, tenant))
        result = await answer if isinstance(answer, asyncio.Future) else answer
        assert isinstance(result, CountResult)
        if store is not None:
            store.keyring.admit(tenant)
        self._admit(tenant)
        return pb.EraseTenantResponse(num_blocks=result.count, had_key=had_key)

    def _admit(self, tenant: str) -> None:
        """Let later daemons find the tenant's memory again, unless some of it was not even read yet."""
        book, unread = self._book, self._planner.found_memory.namespaces()
        if book is not None and unread.isdisjoint(book.numbers_of(tenant)):
            book.admit(tenant)

    def list(self) -> pb.ListTenantsResponse:
        """Return all tenants, with or without a policy, and what each has moved and keeps."""
        store = self._appliance.engines.get(self._planner.core.ladder.log_tier)
        shares = self._appliance.mover.shares
        cold: dict[str, int] = {}
        for namespace in self._planner.catalog.namespaces.values():
            tenant = tenant_of(namespace.identity.domain)
            cold[tenant] = cold.get(tenant, 0) + self._planner.core.transitions.cold_bytes[namespace.id]
        rows = []
        for tenant in sorted(self._known()):
            moved = {
                f"{edge.source}>{edge.target}": edge.bytes_of_tenant[tenant]
                for edge in self._appliance.mover.statistics()
                if edge.bytes_of_tenant[tenant]
            }
            rows.append(
                pb.TenantStatus(
                    name=tenant or COMMON,
                    bandwidth_share=shares.weight(tenant),
                    nvme_bytes=cold.get(tenant, 0),
                    copied_bytes=moved,
                    has_key=isinstance(store, ColdStore) and store.has_key(tenant),
                    master_key=store.keyring.wrapped_by(tenant) if isinstance(store, ColdStore) else "",
                )
            )
        return pb.ListTenantsResponse(tenants=rows)

    def _domain(self, name: str) -> str:
        """Return the first part of the isolation domains that a name means."""
        tenant = self._tenants().get(name)
        if tenant is not None and (domain := tenant.domain(name)) != f"tenant:{name}":
            raise error(
                "BAD_REQUEST",
                f"{name} keeps nothing of its own; what it shares is {domain or COMMON}: "
                f"`kvtier tenant erase {domain or COMMON}` erases it for all that share it",
            )
        try:
            return domain_named(name)
        except ValueError as problem:
            raise error("BAD_REQUEST", str(problem)) from problem

    def _known(self) -> set[str]:
        """Return the tenants that have blocks, a key, or a place in the policy."""
        store = self._appliance.engines.get(self._planner.core.ladder.log_tier)
        namespaces = self._planner.catalog.namespaces.values()
        known = {tenant_of(namespace.identity.domain) for namespace in namespaces}
        known.update(tenant.domain(name) for name, tenant in self._tenants().items())
        return known | (store.keyring.tenants() if isinstance(store, ColdStore) else set())
