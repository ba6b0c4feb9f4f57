"""Deadlines of what is over already: they are forgotten, and those that count are kept."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import Reply
from kvtier.appliance.core.requests.leases import SLACK
from kvtier.tiers.block import Tier

from ..rig import CLIENT, Rig, hashes

MANY = SLACK + 200


def test_pins_for_a_week_that_last_a_second_leave_nothing() -> None:
    rig = Rig(nvme_blocks=0)
    chain = rig.put_new("a", 1)
    kept = rig.call()
    rig.do(ev.PinRequested(kept, CLIENT, "", rig.namespace_id, chain, Tier.DRAM, 60.0))
    for _ in range(MANY):
        call = rig.call()
        event = ev.PinRequested(call, CLIENT, "", rig.namespace_id, chain, Tier.DRAM, 600_000.0)
        answers = [one.result for one in rig.planner.handle(event, 0.0) if isinstance(one, Reply)]
        rig.planner.handle(ev.UnpinRequested(answers[0].pin_id), 0.0)  # type: ignore[union-attr]
    pins = rig.planner.pins
    assert len(pins._deadlines) < MANY
    rig.tick(61.0)
    assert len(pins) == 0
    assert not rig.planner.core.pin_floors


def test_a_lease_that_is_kept_alive_without_end_leaves_nothing() -> None:
    rig = Rig(nvme_blocks=0, lease_ttl_s=30.0, lease_grace_s=1.0)
    rig.do(ev.ClientOpened(2, "remote", False, ""))
    rig.put(hashes("a", 1))
    for client in (CLIENT, 2):
        event = ev.AcquireRequested(rig.call(), client, "", rig.namespace_id, hashes("a", 1))
        rig.do(event)
    (mine,), (theirs,) = (rig.planner.leases.clients[client].leases for client in (CLIENT, 2))
    for number in range(MANY):
        rig.planner.handle(ev.KeptAlive(None, CLIENT, [mine], 600.0), number * 1e-3)
    rig.now = MANY * 1e-3
    assert len(rig.planner.leases._deadlines) < MANY
    rig.tick(31.0)
    assert rig.planner.leases.get(theirs) is None, "it ended when it had to"
    assert rig.planner.leases.get(mine) is not None
    rig.tick(600.0)
    lease = rig.planner.leases.get(mine)
    assert lease is not None
    assert lease.is_overdue
