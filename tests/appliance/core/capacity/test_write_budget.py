"""The daily budget of idle copies into the cold store, of all tenants and of each."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.options import PlannerOptions
from kvtier.tiers.base import Cause
from kvtier.tiers.block import NamespaceIdentity

from ..rig import CLIENT, GEOMETRY, STORED, hashes
from .copying_down import BLOCK_BYTES, DAY_S, land_puts, num_written, rest, rig_of, where


def test_idle_copies_stop_at_the_budget_and_go_on_as_it_fills() -> None:
    rig = rig_of(daily_write_bytes=3 * BLOCK_BYTES)
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    rest(rig)
    assert num_written(rig) == 3
    deadline = rig.planner.next_deadline()
    assert deadline == pytest.approx(DAY_S / 3, rel=1e-3)
    assert deadline is not None
    rest(rig, deadline - rig.now)
    assert num_written(rig) == 4
    rest(rig, 2 * DAY_S)
    rest(rig, 2 * DAY_S)
    assert where(rig, "a", 6) == [{"dram", "nvme"}] * 6


def test_spills_count_and_do_not_wait() -> None:
    rig = rig_of(dram_blocks=4, daily_write_bytes=4 * BLOCK_BYTES)
    for name in ("a", "b", "c"):
        assert rig.put(hashes(name, 4)) == [STORED] * 4
    rest(rig)
    assert num_written(rig) >= 8
    assert rig.planner.write_budget.left_bytes(rig.now) == 0


def test_a_higher_budget_takes_effect_at_once_less_what_was_written() -> None:
    rig = rig_of(daily_write_bytes=2 * BLOCK_BYTES)
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    rest(rig)
    options = PlannerOptions(
        high_watermark=1.0, low_watermark=1.0, write="idle", daily_write_bytes=4 * BLOCK_BYTES
    )
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    rest(rig)
    assert num_written(rig) == 4


class TwoTenants:
    """A rig with a budget of sixteen blocks a day: a tenant alone may write half of them."""

    def __init__(self, dram_blocks: int = 32, num_segments: int = 8, daily_blocks: float = 16) -> None:
        daily_bytes = int(daily_blocks * BLOCK_BYTES)
        self.rig = rig_of(
            "idle", dram_blocks, num_segments, num_extents=2, daily_write_bytes=daily_bytes, num_tenants=2
        )
        self._ids: dict[str, int] = {}
        for name in ("a", "b"):
            identity = NamespaceIdentity(b"m" * 16, GEOMETRY, domain=f"tenant:{name}/part")
            call = self.rig.call()
            self.rig.do(ev.NamespaceRegistered(call, identity))
            self._ids[name] = self.rig.answer(call).namespace_id

    def put(self, tenant: str, name: str, count: int) -> None:
        """Put blocks, and let the copies into dram end."""
        rig = self.rig
        rig.do(ev.ClientGone(CLIENT, "closed"))
        rig.do(ev.ClientOpened(CLIENT, "client", True, f"tenant:{tenant}/part"))
        rig.namespace_id = self._ids[tenant]
        rig.start_put(hashes(tenant + name, count))
        land_puts(rig)

    def num_in_nvme(self, tenant: str, name: str, count: int) -> int:
        """Return how many of these blocks nvme has."""
        self.rig.namespace_id = self._ids[tenant]
        return sum("nvme" in tiers for tiers in where(self.rig, tenant + name, count))


def test_one_tenant_does_not_use_up_the_budget_of_all() -> None:
    """Before: idle copies of the other one waited for the next day."""
    two = TwoTenants()
    two.put("a", "", 20)
    two.put("b", "", 4)
    for _ in range(8):
        rest(two.rig)
    assert two.num_in_nvme("a", "", 20) == 8
    assert two.num_in_nvme("b", "", 4) == 4
    # No step retries what the share refuses: the next look is when something may have been written again.
    due = two.rig.planner.next_deadline()
    assert due is not None
    assert due > two.rig.now + DAY_S / 64
    for _ in range(40):
        rest(two.rig, DAY_S / 16)
    assert two.num_in_nvme("a", "", 20) == 20


def test_spills_of_one_tenant_leave_the_other_its_idle_copies() -> None:
    two = TwoTenants(dram_blocks=16, num_segments=32)
    two.put("b", "first", 1)  # it has an extent of memory from here on
    for number in range(8):  # far more than its extent of memory takes
        two.put("a", str(number), 16)
        two.rig.settle()
    assert two.rig.planner.write_budget.is_overdrawn(two.rig.now)
    two.put("b", "", 3)
    for _ in range(4):
        rest(two.rig)
    assert two.num_in_nvme("b", "", 3) == 3


def test_what_a_share_never_pays_for_is_no_reason_to_look_again() -> None:
    """Seeds 11 (verified) and 92 (not verified) of the simulator once did, ten times a second for ever."""
    two = TwoTenants(daily_blocks=1)
    two.put("a", "", 1)
    rest(two.rig)
    two.rig.do(ev.ClientGone(CLIENT, "closed"))
    assert two.num_in_nvme("a", "", 1) == 0
    assert two.rig.planner.next_deadline() is None


def test_a_failed_copy_is_given_back_to_the_budget() -> None:
    rig = rig_of(daily_write_bytes=4 * BLOCK_BYTES)
    rig.start_put(hashes("a", 1))
    land_puts(rig)
    left = rig.planner.write_budget.left_bytes(rig.now)
    (copy,) = rig.copies
    rig.finish(copy, Cause.IO_ERROR)
    assert left == 3 * BLOCK_BYTES
    assert rig.planner.write_budget.left_bytes(rig.now) == 4 * BLOCK_BYTES
