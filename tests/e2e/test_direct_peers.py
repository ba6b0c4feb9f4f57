"""The direct path to runtimes on two GPUs of one host, of which the daemon's hbm is on the first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.appliance.core.events import EvictRequested
from kvtier.appliance.gpu import page_service as direct
from kvtier.appliance.gpu.peer_devices import carries
from kvtier.clients import PutOutcome
from kvtier.clients import Tier as Asked
from kvtier.tiers.block import Tier
from tests.contracts.devices import fake_pair
from tests.fakes.gpu.device import FakeDevice

from .direct_device import Mute
from .direct_scene import NUM_STREAMS, WAIT_S, Runtime, Served, names, runtime_at
from .test_device_hbm import resident

CHAIN = names("chain", 8)
SINGLES = [names(f"single {number}", 1) for number in range(8)]  # one block each: any of them may leave dram
IDS = [5, 2, 30, 11, 7, 19, 3, 28]
OTHERS = [1, 4, 6, 8, 9, 10, 12, 13]


def two_gpus(folder: Path, *, is_live: bool = True, has_peer_access: bool = True) -> Served:
    home = FakeDevice(is_live=is_live, num_streams=NUM_STREAMS, seed=1)
    peer = FakeDevice(1, is_live=is_live, seed=4, beside=home, has_peer_access=has_peer_access)
    return Served(folder, device=home, peers=[peer])


@pytest.fixture(params=[True, False], ids=["peer access", "no peer access"])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with two_gpus(tmp_path, has_peer_access=request.param) as running:
        yield running
        running.assert_at_rest()


def leave_in_hbm_only(served: Served, runtime: Runtime) -> None:
    """Store the single blocks of SINGLES from pages IDS, bring them into hbm and evict them from dram."""
    for page, chain in zip(IDS, SINGLES, strict=True):
        assert runtime.pages.put(runtime.namespace, chain, [page]).num_stored == 1
        assert runtime.client.prefetch(runtime.namespace, chain, Asked.HBM).num_promoted == 1
    served.until(lambda: resident(served.daemon, Tier.HBM) == 8)
    served.thread.call(
        lambda: served.daemon.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 1 << 30))
    )
    served.until(lambda: resident(served.daemon, Tier.DRAM) == 0)


def get_singles(runtime: Runtime) -> int:
    """Get the blocks of SINGLES into pages OTHERS; return how many came."""
    get = runtime.pages.get
    loaded = [
        get(runtime.namespace, chain, [page]).num_loaded for page, chain in zip(OTHERS, SINGLES, strict=True)
    ]
    return sum(loaded)


def test_runtimes_on_both_share_blocks(served: Served) -> None:
    with runtime_at(served.target) as one, runtime_at(served.target, gpu=1) as two:
        one.fill(1)
        two.fill(2)
        assert one.pages.put(one.namespace, CHAIN, IDS).num_stored == 8
        assert two.pages.get(two.namespace, CHAIN, OTHERS).num_loaded == 8
        assert two.read(OTHERS) == one.read(IDS)
        back = names("back", 8)
        assert two.pages.put(two.namespace, back, IDS).num_stored == 8
        assert one.pages.get(one.namespace, back, OTHERS).num_loaded == 8
        assert one.read(OTHERS) == two.read(IDS)


def test_what_is_in_hbm_only_comes_over_the_peer_or_by_way_of_dram(served: Served) -> None:
    has_access = served.peers[0].has_peer_access
    with runtime_at(served.target) as one, runtime_at(served.target, gpu=1) as two:
        one.fill(3)
        leave_in_hbm_only(served, one)
        assert get_singles(two) == 8
        assert two.read(OTHERS) == one.read(IDS)
        assert resident(served.daemon, Tier.DRAM) == (0 if has_access else 8)
    assert served.count("direct_gets_without_hbm") == (0 if has_access else 8)


def test_a_lost_peer_takes_its_own_runtimes_along_and_nobody_else(tmp_path: Path) -> None:
    with two_gpus(tmp_path, is_live=False) as served:
        one, two = Runtime(served.target), Runtime(served.target, gpu=1)
        one.fill(4)
        served.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        get = two.start(two.pages.get, two.namespace, CHAIN, OTHERS)
        served.until(lambda: has_copies(served.peers[0]))
        served.peers[0].lose("fell off the bus")
        report = served.let_finish(get)
        assert (report.num_loaded, report.reason) == (0, "device_failed")
        late = served.let_finish(two.start(two.pages.put, two.namespace, names("late", 8), IDS))
        assert late.outcomes == [PutOutcome.FAILED] * 8
        assert served.thread.call(served.num_leases) == 0
        report = served.let_finish(one.start(one.pages.get, one.namespace, CHAIN, OTHERS))
        assert report.num_loaded == 8
        assert one.read(OTHERS) == one.read(IDS)
        two.client.close()
        one.client.close()
        served.assert_at_rest()


def test_the_lease_holds_until_the_peer_is_done(tmp_path: Path) -> None:
    with two_gpus(tmp_path, is_live=False) as served:
        with runtime_at(served.target) as one, runtime_at(served.target, gpu=1) as two:
            one.fill(5)
            served.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
            stored = one.read(IDS)
            get = two.start(two.pages.get, two.namespace, CHAIN, OTHERS)
            served.until(lambda: has_copies(served.peers[0]))
            served.device.run()  # home's time passes; the peer stands still
            assert served.thread.call(served.num_leases) == 1
            assert served.evict(at_rest=False) == 0
            assert served.let_finish(get).num_loaded == 8
            assert two.read(OTHERS) == stored
            assert served.thread.call(served.num_leases) == 0
            served.let_finish(two.start(two.pages.unregister))
            served.let_finish(one.start(one.pages.unregister))
        served.assert_at_rest()


def test_a_lost_home_takes_hbm_along_and_the_peer_is_served_from_dram(tmp_path: Path) -> None:
    with two_gpus(tmp_path) as served:
        one, two = Runtime(served.target), Runtime(served.target, gpu=1)
        one.fill(6)
        leave_in_hbm_only(served, one)
        others = names("in dram", 8)
        assert one.pages.put(one.namespace, others, IDS).num_stored == 8
        served.device.lose("fell off the bus")
        assert get_singles(two) == 0  # the first is asked for, and found lost; the others are forgotten
        served.until(lambda: resident(served.daemon, Tier.HBM) == 0)
        assert two.pages.get(two.namespace, others, OTHERS).num_loaded == 8
        assert two.read(OTHERS) == one.read(IDS)
        assert served.count("direct_get_tier_offline") == 1
        two.pages.unregister()
        one.client.close()
        two.client.close()
        served.assert_at_rest()


def test_a_peer_that_is_not_quiet_is_shut_down_before_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "CLOSE_GRACE_S", 0.1)
    home = FakeDevice(num_streams=NUM_STREAMS, seed=1)
    peer = Mute(1, seed=4, beside=home)
    with Served(tmp_path, device=home, peers=[peer]) as served:
        one, two = Runtime(served.target), Runtime(served.target, gpu=1)
        one.fill(7)
        served.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        peer.is_mute = True
        get = two.start(two.pages.get, two.namespace, CHAIN, OTHERS, deadline_s=1.0)
        assert get.exception(WAIT_S) is not None
        served.until(lambda: has_copies(peer))
        assert served.thread.call(served.num_leases) == 1
        one.client.close()
        two.client.close()
        served.thread.wait(served.daemon.direct.close())
        assert served.thread.call(served.num_leases) == 0
        assert two.read(OTHERS) == one.read(IDS), "its last copies still found what they read"


def has_copies(device: FakeDevice) -> bool:
    """Whether a stream has a copy to do."""
    return any(type(item).__name__ == "Copying" for stream in device._streams for item in stream.work)


# -------------------------------------------------------------------------------------- the trial at start


def test_a_way_that_carries() -> None:
    home, peer = fake_pair(is_live=True)
    assert peer.reach(home)
    assert carries(peer, home)
    for device in (peer, home):
        device.shut_down()
        assert device.check_integrity() == []
        assert device.left_behind == []


def test_a_way_that_brings_something_else_is_found() -> None:
    home, peer = fake_pair(is_live=True)
    assert peer.reach(home)
    move = peer._move

    def damage(pieces: object, piece: int) -> None:
        move(pieces, piece)  # type: ignore[arg-type]
        target = int(pieces.targets[piece])  # type: ignore[attr-defined]
        if target in peer.memory.regions:  # not the way from there back to the host
            peer.poke(target + 77, b"\x00\x01\x02")

    peer._move = damage  # type: ignore[method-assign]
    assert not carries(peer, home)
    peer.shut_down()
    home.shut_down()
