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
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from ...v1.addresses import default_address, socket_path
from ...v1.shm import PAGE_BYTES
from .. import units
from ..core.options import PlannerOptions
from . import sources
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
    """How long promises last."""

    ttl_s: Seconds = Field(default=30.0, alias="ttl")
    """A lease's life when its caller names none."""
    ttl_max_s: Seconds = Field(default=600.0, alias="ttl_max")
    """The longest life a caller may ask for."""
    grace_s: Seconds = Field(default=2.0, alias="grace")
    """After a lease's deadline, how long its holder may still release it."""
    pin_ttl_max_s: Seconds = Field(default=7 * 86_400.0, alias="pin_ttl_max")
    """The longest life of a pin."""
    reservation_ttl_s: Seconds = Field(default=10.0, alias="reservation_ttl")
    """How long room reserved for a put is held when its caller gave no deadline."""
    client_ttl_s: Seconds = Field(default=60.0, alias="client_ttl")
    """Silence after which a client without a local connection counts as gone."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for key in ("ttl", "ttl_max", "pin_ttl_max", "reservation_ttl", "client_ttl"):
            if getattr(self, f"{key}_s") <= 0:
                refuse(key, "must be longer than 0s")
        if self.ttl_s > self.ttl_max_s:
            ttl, longest = units.format_duration(self.ttl_s), units.format_duration(self.ttl_max_s)
            refuse("ttl", f"{ttl} is longer than ttl_max ({longest}); lower ttl or raise ttl_max")
        return self


class Limits(Section):
    """What bounds every queue and table; beyond it the answer is RESOURCE_EXHAUSTED."""

    max_clients: Count = 256
    """Clients at the same time."""
    max_concurrent_rpcs: Count = 256
    """gRPC calls in progress at the same time, watchers included."""
    max_blocks_per_request: Annotated[int, Field(ge=1, le=4096)] = 4096
    """Blocks one call may name."""
    staging_per_client_bytes: Bytes = Field(default=64 << 20, alias="staging_per_client")
    """Largest staging extent a client gets, a multiple of 4KiB."""
    max_stream_put_bytes: Bytes = Field(default=256 << 20, alias="max_stream_put")
    """Payload of one put through gRPC; it is held in memory meanwhile."""
    max_namespaces: Count = 1024
    """Namespaces in one life of the daemon."""
    max_sessions: Count = 65_536
    """Sessions at the same time."""
    max_leases_per_client: Count = 4096
    """Leases one client may hold."""
    max_pins: Count = 65_536
    """Pins at the same time."""
    max_pinned: Fraction = 0.5
    """Share of a memory tier that leases and pins of one client may hold."""
    max_waiting_puts: Count = 256
    """Puts that may wait for room at the same time."""
    put_wait_s: Seconds = Field(default=5.0, alias="put_wait")
    """Longest time a put waits for room when its caller gave no deadline."""
    session_idle_s: Seconds = Field(default=3600.0, alias="session_idle")
    """Silence after which a session counts as ended."""
    max_copies_per_edge: Annotated[int, Field(ge=1, le=1024)] = 8
    """Batches of copies in flight between one pair of tiers."""
    max_story_lines: Count = 100_000
    """Lines of story remembered, for all blocks and sessions together."""
    max_block_events: Count = 65_536
    """Block events remembered for watchers that come back."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        require_multiple("staging_per_client", self.staging_per_client_bytes, PAGE_BYTES)
        if self.max_stream_put_bytes < 1 << 20:
            refuse("max_stream_put", f"{units.format_bytes(self.max_stream_put_bytes)} is less than 1MiB")
        if self.max_pinned == 0:
            refuse("max_pinned", "0% lets nobody read; write 50%")
        return self


class Prefetching(Section):
    """Bounds on what comes up before anyone asks; who that is, the prefetch policy says."""

    bandwidth: Fraction = 0.5
    """Share of the bandwidth from nvme that prefetches may take."""
    memory: Fraction = 0.25
    """Share of dram that may be prefetched and not used yet."""
    in_flight_bytes: Bytes = Field(default=256 << 20, alias="in_flight")
    """Bytes of prefetches on their way at one time."""
    window_s: Seconds = Field(default=60.0, alias="window")
    """How long a block that came up for an arrival, or because a client asked, is expected to be used."""


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
    """Describe the services to tools such as grpcurl."""
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
        limits, leases, nvme = self.limits, self.leases, self.tiers.nvme
        return PlannerOptions(
            max_blocks_per_request=limits.max_blocks_per_request,
            max_namespaces=limits.max_namespaces,
            max_clients=limits.max_clients,
            max_sessions=limits.max_sessions,
            max_leases_per_client=limits.max_leases_per_client,
            max_pins=limits.max_pins,
            max_pinned_fraction=limits.max_pinned,
            max_waiting_puts=limits.max_waiting_puts,
            lease_ttl_s=leases.ttl_s,
            lease_ttl_max_s=leases.ttl_max_s,
            pin_ttl_max_s=leases.pin_ttl_max_s,
            lease_grace_s=leases.grace_s,
            reservation_ttl_s=leases.reservation_ttl_s,
            put_wait_s=limits.put_wait_s,
            session_idle_s=limits.session_idle_s,
            high_watermark=self.watermarks.high,
            low_watermark=self.watermarks.low,
            prefetch_bandwidth_fraction=self.prefetch.bandwidth,
            max_prefetched_fraction=self.prefetch.memory,
            max_prefetch_bytes=self.prefetch.in_flight_bytes,
            prefetch_window_s=self.prefetch.window_s,
            max_story_lines=limits.max_story_lines,
            quotas=quotas_of(self.tenants),
            write="idle" if nvme is None else nvme.write,
            daily_write_bytes=None if nvme is None else nvme.daily_limit_bytes,
        )
