"""Settings: what an administrator may choose, as one checked, frozen value.

Keys are words of DESIGN; values carry their unit (`64GiB`, `30s`, `90%`), so keys do not; the attributes
behind them do (`capacity` -> `capacity_bytes`). Everything is checked before the daemon touches memory or
disk, and every refusal says where it was written and what to write instead. An unknown key is an error:
a misspelt limit that is silently ignored is the most expensive kind of default.

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
from .observe import Observe, check_readers
from .policy import Policy
from .tenants import Access, Tenants, check_access, quotas_of
from .tiers import Tiers


class Watermarks(Section):
    """When a tier makes room before it must."""

    high: Fraction = 0.95
    """Share of a memory tier from which on its coldest blocks leave."""
    low: Fraction = 0.80
    """Share of dram from which on what is put is copied down ahead; it stays there, too."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        low, high = units.format_fraction(self.low), units.format_fraction(self.high)
        if self.low >= self.high:
            refuse("low", f"{low} is not below high ({high}); lower low or raise high")
        return self


class Leases(Section):
    """Lifetime of leases."""

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


class Limits(Section):
    """Bounds that depend on the host and its runtimes; beyond them the answer is RESOURCE_EXHAUSTED."""

    max_clients: Count = 256
    """Clients connected at the same time. Raise it on hosts with more processes that use kvtier; each client
    takes file descriptors and a staging extent."""
    staging_per_client_bytes: Bytes = Field(default=64 << 20, alias="staging_per_client")
    """Largest staging extent of a client, a multiple of 4KiB. Lower it on hosts with many clients and little
    memory; raise it when one put is larger."""
    max_pinned: Fraction = 0.5
    """Share of a memory tier that leases and pins of one client may hold. Raise it when one runtime has the
    daemon to itself; lower it when several must not starve each other."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        require_multiple("staging_per_client", self.staging_per_client_bytes, PAGE_BYTES)
        if self.max_pinned == 0:
            refuse("max_pinned", "0% refuses every read; write 50%")
        return self


class Prefetching(Section):
    """Bound on prefetching; which blocks are prefetched is decided by `policy.prefetch`."""

    bandwidth: Fraction = 0.5
    """Share of the bandwidth from nvme that prefetches may take. Lower it when other programs use the
    device."""


class Settings(Section):
    """Everything an administrator may choose."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    listen: Addresses = Field(default_factory=lambda: [default_address(os.environ)])
    """Addresses to serve gRPC on: unix:///absolute/path or host:port."""
    tiers: Tiers = Field(default_factory=Tiers)
    """Where bytes live."""
    policy: Policy = Policy()
    """Who decides what moves."""
    watermarks: Watermarks = Watermarks()
    """When a tier makes room."""
    prefetch: Prefetching = Prefetching()
    """Bounds on prefetching."""
    compression: CompressionSettings = CompressionSettings()
    """In which form fragments enter the cold store."""
    encryption: EncryptionSettings = EncryptionSettings()
    """Whether what lies on the device can be read without a key."""
    leases: Leases = Leases()
    """How long leases, pins and reservations last."""
    limits: Limits = Limits()
    """What bounds every queue and table."""
    reflection: bool = True
    """Describes the services to tools such as grpcurl, on every connection. Turn it off where a security
    policy forbids it."""
    observe: Observe = Observe()
    """What the daemon shows of itself, and to whom."""
    access: Access = Access()
    """How callers prove who they are, and who is an administrator."""
    tenants: Tenants = {}
    """Who shares this daemon without sharing blocks, by name. None: everybody who gets in is one tenant."""

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        check_access(self.access, self.tenants, any(socket_path(address) is None for address in self.listen))
        check_readers(self.observe, self.access, self.tenants)
        return self

    @property
    def socket_mode(self) -> int:
        """Mode of the Unix sockets: for this user and group, or for the tenants, whoever they run as."""
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

    def planner_options(self) -> PlannerOptions:
        """Return what the pure core needs of it."""
        limits, nvme = self.limits, self.tiers.nvme
        return PlannerOptions(
            max_clients=limits.max_clients,
            max_pinned_fraction=limits.max_pinned,
            lease_ttl_s=self.leases.ttl_s,
            high_watermark=self.watermarks.high,
            low_watermark=self.watermarks.low,
            prefetch_bandwidth_fraction=self.prefetch.bandwidth,
            quotas=quotas_of(self.tenants),
            write="idle" if nvme is None else nvme.write,
            daily_write_bytes=None if nvme is None else nvme.daily_limit_bytes,
        )
