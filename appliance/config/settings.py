"""Settings: all sections of the policy file as one checked, immutable value.

Values have units (`64GiB`, `30s`, `90%`), so keys have none; attributes do (`capacity` -> `capacity_bytes`).
Everything is checked before the daemon touches memory or disk; an error names the place and what to write
instead. An unknown key is an error: a misspelt limit that is silently ignored costs most.

A setting is added only when its description can say when an administrator changes it; other constants stand
beside the code that uses them.

    settings = Settings.load(Path("policy.yaml"), overrides=["tiers.dram.capacity=1GiB"])
    settings.tiers.dram.num_extents
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from ...v1.addresses import default_address, socket_path
from ...v1.shm import PAGE_BYTES
from ..core.options import PlannerOptions
from . import sources, units
from .compression import CompressionSettings
from .encryption import EncryptionSettings
from .fields import (
    Addresses,
    Bytes,
    Count,
    Fraction,
    Seconds,
    Section,
    refuse,
    require_multiple,
)
from .object_store import ObjectSettings
from .observe import Observe, check_readers
from .peers import PeerSettings, check_peers
from .policy import Policy
from .tenants import Access, QuotaSettings, Tenants, check_access, quotas_of, shares_of
from .tiers import Tiers


class LeaseSettings(Section):
    """The `leases:` section."""

    ttl_s: Seconds = Field(default=30.0, alias="ttl")
    """Lifetime of a lease when its caller names none. Raise it for runtimes that stall for longer while they
    read (a debugger, a swapped host); lower it to get memory back sooner from runtimes that hang."""

    @model_validator(mode="after")
    def _check_ttl(self) -> Self:
        longest_s = PlannerOptions().lease_ttl_max_s
        if self.ttl_s <= 0:
            refuse("ttl", "must be longer than 0s")
        if self.ttl_s > longest_s:
            ttl, longest = units.format_duration(self.ttl_s), units.format_duration(longest_s)
            refuse("ttl", f"{ttl} is longer than {longest}, the longest lease; write {longest} or less")
        return self


class LimitSettings(Section):
    """Bounds that depend on the host and its runtimes; beyond them the answer is RESOURCE_EXHAUSTED."""

    max_clients: Count = 256
    """Clients connected at the same time. Raise it on hosts with more processes that use kvtier; each client
    takes file descriptors and a staging extent."""
    staging_per_client_bytes: Bytes = Field(default=64 << 20, alias="staging_per_client")
    """Largest staging extent of a client, a multiple of 4KiB. Lower it on hosts with many clients and little
    memory; raise it when one put is larger."""
    max_pinned: Fraction = 0.5
    """Share of a memory tier that leases of one client may hold, and pins of all clients together. Raise it
    when one runtime has the daemon to itself; lower it when several must not starve each other."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        require_multiple("staging_per_client", self.staging_per_client_bytes, PAGE_BYTES)
        if self.max_pinned == 0:
            refuse("max_pinned", "0% refuses every read; write 50%")
        return self


class Settings(Section):
    """All settings of a daemon."""

    schema_version: Literal[1] = 1
    """Version of the file format; changes with an upgrade only."""
    listen: Addresses = Field(default_factory=lambda: [default_address(os.environ)])
    """Addresses to serve gRPC on: unix:///absolute/path or host:port. Add host:port to serve other hosts."""
    tiers: Tiers = Field(default_factory=Tiers)
    """Tiers of the hierarchy, fastest first."""
    policy: Policy = Policy()
    """Policies of eviction, admission and prefetch, by name."""
    compression: CompressionSettings = CompressionSettings()
    """Codecs of fragments in nvme, in an object store and in streams."""
    encryption: EncryptionSettings = EncryptionSettings()
    """Encryption of nvme and of an object store."""
    object: ObjectSettings = ObjectSettings()
    """Store of blocks that hosts share."""
    peers: PeerSettings = PeerSettings()
    """Other hosts that blocks are fetched from."""
    leases: LeaseSettings = LeaseSettings()
    """Lifetime of leases."""
    limits: LimitSettings = LimitSettings()
    """Bounds per client and on clients."""
    reflection: bool = True
    """Describes the services to tools such as grpcurl, on every connection. Turn it off where a security
    policy forbids it."""
    observe: Observe = Observe()
    """Metrics, web page, log, traces and events."""
    access: Access = Access()
    """Authentication of callers, and administrators."""
    tenants: Tenants = {}
    """Tenants by name, which do not share blocks unless `sharing` says so. Empty: all callers are one
    tenant."""

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        check_access(self.access, self.tenants, any(socket_path(address) is None for address in self.listen))
        check_readers(self.observe, self.access, self.tenants)
        tls = self.access.tls
        check_peers(
            self.peers,
            self.listen,
            has_authority=tls is not None and tls.client_ca is not None,
            has_tls=tls is not None,
            has_tenants=bool(self.tenants),
        )
        if self.object.is_pool and self.encryption.master_key is not None:
            why = "a pool of Mooncake lists no tenants' keys, so nothing in it is encrypted"
            refuse("object.url", f"{why}; name another store, or leave encryption.master_key out")
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        """Refuse quotas of tiers that there are not."""
        known = [tier.label for tier in self.tiers.ladder.tiers]
        for tenant, of in self.tenants.items():
            for name in of.quota.by_tier:
                if name not in known:
                    allowed = dict.fromkeys([*known, *sources.keys_of(QuotaSettings)])
                    refuse(
                        f"tenants.{tenant}.quota.{name}", f"unknown key; allowed here: {', '.join(allowed)}"
                    )
        return self

    @property
    def socket_mode(self) -> int:
        """Return the mode of the Unix sockets: for this user and group, with tenants for every user."""
        return 0o666 if self.tenants else 0o660

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        env: Mapping[str, str] | None = None,
        overrides: Iterable[str] = (),
    ) -> Self:
        """Read settings: `overrides` (KEY.KEY=VALUE) > `env` (default: this process's) > file > defaults.

        Raises SettingsError, which names source, path and the fix of every problem found.
        """
        return cls.load_traced(path, os.environ if env is None else env, overrides)[1]

    @classmethod
    def load_traced(
        cls,
        path: Path | None,
        env: Mapping[str, str],
        overrides: Iterable[str] = (),
        text: str | None = None,
    ) -> tuple[sources.Gathered, Self]:
        """Read settings as `load` does; return them with where each was written.

        `text` stands for what is in the file, which is then not read. Raises SettingsError.
        """
        gathered = sources.gather(cls, path, env, overrides, text)
        values = {"listen": default_address(env), **gathered.values}
        try:
            return gathered, cls.model_validate(values)
        except ValidationError as error:
            raise sources.explain(error, cls, gathered) from error

    def canonical(self) -> dict[str, Any]:
        """Return all settings, defaults included, as plain values in the units people write."""
        return self.model_dump(by_alias=True)

    def to_yaml(self) -> str:
        """Return `canonical()` as YAML that `load` reads back as an equal value."""
        return yaml.safe_dump(self.canonical(), sort_keys=False)

    @property
    def stores_in_plain(self) -> bool:
        """Whether blocks are written to nvme or an object store as they are."""
        return self.encryption.master_key is None and (self.tiers.nvme is not None or bool(self.object.url))

    def planner_options(self) -> PlannerOptions:
        """Return the options of the planner that settings choose; the rest keep their defaults."""
        limits, nvme = self.limits, self.tiers.nvme
        return PlannerOptions(
            max_clients=limits.max_clients,
            max_pinned_fraction=limits.max_pinned,
            lease_ttl_s=self.leases.ttl_s,
            num_tenants=len({tenant.domain(name) for name, tenant in self.tenants.items()}),
            quotas=quotas_of(self.tenants, self.tiers.ladder),
            write="idle" if nvme is None else nvme.write,
            daily_write_bytes=None if nvme is None else nvme.daily_limit_bytes,
            share=self.object.share,
            daily_export_bytes=self.object.daily_exports_bytes,
            shares=shares_of(self.tenants, self.object.share),
            namespace_shares=self.object.namespaces,
            prices=self.object.price.for_planner(),
        )
