"""Archiving of two tenants: turns, shares, and how much a step looks at where a quota is full."""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import archiving
from kvtier.appliance.core.options import TenantQuota
from kvtier.tiers.block import NamespaceIdentity, Tier

from ..rig import CLIENT, GEOMETRY, Rig, hashes

CHAIN = 4096
#: More than a step of a tenant, with one quota, may look at, and less than two chains.
MAX_LOOKS = 6000


class Tenants(Rig):
    """A rig of two tenants with a namespace each, of which acme may keep 64 blocks in nvme."""

    def __init__(self, **options: Any) -> None:
        quotas = {"tenant:acme": TenantQuota(cold_bytes=64 * GEOMETRY.block_bytes)}
        super().__init__(
            dram_blocks=256, num_extents=64, nvme_blocks=256, num_segments=64,
            num_tenants=2, quotas=quotas, **options,
        )  # fmt: skip
        self.numbers: dict[str, tuple[int, int]] = {}  # tenant -> its client, its namespace
        for client, tenant in enumerate(("acme", "bolt"), CLIENT + 1):
            self.do(ev.ClientOpened(client, tenant, True, f"tenant:{tenant}"))
            call = self.call()
            identity = NamespaceIdentity(b"m" * 16, GEOMETRY, domain=f"tenant:{tenant}")
            self.do(ev.NamespaceRegistered(call, identity))
            self.numbers[tenant] = client, self.answer(call).namespace_id

    def put_as(self, tenant: str, chain: list[bytes], session: str) -> None:
        """Put a chain of a session, 512 blocks at a time."""
        self.client, self.namespace_id = self.numbers[tenant]
        for first in range(0, len(chain), 512):
            parent = chain[first - 1] if first else b""
            self.put(chain[first : first + 512], parent, session_id=f"{tenant}\t{session}")

    def archive(self, tenant: str, session: str) -> int:
        """End a session. Returns how many of its blocks wait."""
        call = self.call()
        self.do(ev.SessionEnded(call, self.numbers[tenant][0], f"{tenant}\t{session}", True))
        return int(self.answer(call).count)

    def num_stored(self, tenant: str, chain: list[bytes]) -> int:
        """Return how many blocks of a chain are in nvme."""
        self.namespace_id = self.numbers[tenant][1]
        return sum("nvme" in self.where(name) for name in chain)


class CountingRow:
    """A column of the catalog that counts how often it is read."""

    def __init__(self, column: Any) -> None:
        self.column, self.num_reads = column, 0

    def __getitem__(self, row: int) -> int:
        self.num_reads += 1
        return int(self.column[row])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.column, name)


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


def test_a_long_chain_at_a_full_quota_is_looked_at_in_parts(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it may go: memory continues what the store has. Each step gives up after a part."""
    rig, looks = tenants, 0
    monkeypatch.setattr(type(rig.planner), "check_integrity", lambda self: [])  # of thousands of blocks
    rig.put_as("acme", hashes("long", CHAIN), "s")
    assert rig.archive("acme", "s") == CHAIN
    num_steps = 0
    while len(rig.planner.pressure.archiving):
        column = CountingRow(rig.planner.catalog.first_child)
        rig.planner.catalog.first_child = column  # type: ignore[assignment]
        rig.tick()
        rig.planner.catalog.first_child = column.column
        looks = max(looks, column.num_reads)
        assert looks < MAX_LOOKS
        rig.settle()
        num_steps += 1
    assert looks
    assert num_steps <= 2 * CHAIN // archiving.MAX_STEPS
    assert rig.num_stored("acme", hashes("long", CHAIN)) == 64


def test_at_a_full_quota_the_ends_of_a_long_chain_make_way(tenants: Tenants) -> None:
    rig, old, new = tenants, hashes("old", 64), hashes("new", 48)
    rig.put_as("acme", old, "old")
    rig.archive("acme", "old")
    rig.settle()
    assert rig.num_stored("acme", old) == 64
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.put_as("acme", new, "new")
    rig.archive("acme", "new")
    for _ in range(8):
        rig.tick()
        rig.settle()
    assert rig.num_stored("acme", new) == 48
    assert rig.num_stored("acme", old) == 16


def test_tenants_take_turns(tenants: Tenants) -> None:
    """Whatever acme archives, what bolt archives is stored a few steps later."""
    rig, mine = tenants, hashes("mine", 64)
    for number in range(4):
        rig.put_as("acme", hashes(f"many {number}", 128), f"{number}")
    rig.put_as("bolt", mine, "s")
    for number in range(4):
        rig.archive("acme", f"{number}")
    assert rig.archive("bolt", "s") == 64
    rig.tick()
    rig.tick()
    begun = {
        item.label.prefix_hash for copy in rig.started for item in copy.items if copy.target is Tier.NVME
    }
    assert begun >= set(mine)


def test_blocks_of_one_tenant_that_wait_leave_the_others_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block waits once, and of eight places each of two tenants has two for certain, four alone."""
    monkeypatch.setattr(archiving, "MAX_QUEUED", 8)
    rig = Tenants(max_spill_bytes=1)
    rig.put_as("acme", hashes("a", 4), "1")
    rig.put_as("acme", hashes("b", 4), "2")
    rig.put_as("bolt", hashes("mine", 2), "s")
    rig.put_as("acme", hashes("a", 4), "3")
    assert rig.archive("acme", "1") == 4
    assert rig.archive("acme", "3") == 4
    assert len(rig.planner.pressure.archiving) <= 4, "each waits once"
    assert rig.archive("acme", "2") == 0
    assert rig.planner.story.counters["archives_beyond_share"] == 4
    assert rig.archive("bolt", "s") == 2
