"""What every pair of devices of one process promises: one reads the other's memory, in order, where it
reaches it, and both read host memory that one of them registered."""

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.tiers.gpu.device.contract import Device, DeviceError, DeviceFault, DeviceMemory, Stream
from tests.contracts.devices import PAIRS, DeviceCase, fake_pair, pieces, stubbed_pair
from tests.fakes.gpu.device import FakeDevice

SIZE = 1 << 18
STEP = 1 << 12
PARAMS = [pytest.param(kind, marks=pytest.mark.gpu if kind == "cuda" else ()) for kind in PAIRS]


class Pair:
    """`home` holds memory and registered host memory; `peer` copies out of both."""

    def __init__(self, kind: str, home: Device, peer: Device) -> None:
        self.home, self.peer = DeviceCase(kind, home), DeviceCase(kind, peer)
        self.mapping = mmap.mmap(-1, 2 * SIZE)
        whole = np.frombuffer(self.mapping, np.uint8)
        self.sent, self.came = whole[:SIZE], whole[SIZE:]
        self.sent[:] = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        self.host = home.register_host(memoryview(self.mapping), is_read_only=False)
        self.at_home, self.at_peer = home.allocate(SIZE), peer.allocate(SIZE)

    def streams(self) -> tuple[Stream, Stream]:
        """A stream of each."""
        first, second = self.home.device.take_stream(), self.peer.device.take_stream()
        assert first is not None
        assert second is not None
        return first, second

    def fill_home(self, stream: Stream) -> None:
        """Enqueue what writes home's memory, piece by piece."""
        stream.copy(pieces(*[(self.host + i, self.at_home.address + i, STEP) for i in range(0, SIZE, STEP)]))

    def fetch(self, stream: Stream) -> None:
        """Enqueue the way from home's memory over the peer's to the host."""
        there = [
            (self.at_home.address + i, self.at_peer.address + i, 2 * STEP) for i in range(0, SIZE, 2 * STEP)
        ]
        stream.copy(pieces(*there))
        stream.copy(pieces((self.at_peer.address, self.host + SIZE, SIZE)))

    def close(self) -> None:
        self.peer.device.shut_down()
        self.home.device.shut_down()


@pytest.fixture(params=PARAMS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    try:
        home, peer = PAIRS[request.param]()
    except DeviceError as error:
        assert request.param == "cuda"
        pytest.skip(str(error))
    made = Pair(request.param, home, peer)
    yield made
    made.close()
    assert getattr(home, "violations", []) == []
    assert getattr(peer, "violations", []) == []


def reach_or_skip(pair: Pair) -> None:
    if not pair.peer.device.reach(pair.home.device):
        assert pair.home.kind == "cuda"
        pytest.skip("these GPUs do not reach each other")


def test_a_peer_s_copy_comes_behind_an_event_of_home(pair: Pair) -> None:
    reach_or_skip(pair)
    assert pair.peer.device.reach(pair.home.device), "again: no effect"
    on_home, on_peer = pair.streams()
    for _ in range(3):
        pair.came[:] = 0
        pair.fill_home(on_home)
        written = on_home.record()
        on_peer.wait(written)
        pair.home.device.recycle(written)
        pair.fetch(on_peer)
        read = on_peer.record()
        on_home.wait(read)  # the next round writes what this one reads
        _finish_both(pair, on_home, on_peer)
        np.testing.assert_array_equal(pair.came, pair.sent)
        pair.peer.device.recycle(read)


def _finish_both(pair: Pair, on_home: Stream, on_peer: Stream) -> None:
    for device in (pair.home.device, pair.peer.device, pair.home.device):
        if isinstance(device, FakeDevice):
            device.run()  # its time passes here only, and each waits for the other
    assert pair.peer.finish(on_peer.record()) is None
    assert pair.home.finish(on_home.record()) is None


def test_what_the_host_knows_to_be_written_needs_no_event(pair: Pair) -> None:
    reach_or_skip(pair)
    on_home, on_peer = pair.streams()
    pair.fill_home(on_home)
    assert pair.home.finish(on_home.record()) is None
    pair.fetch(on_peer)
    assert pair.peer.finish(on_peer.record()) is None
    np.testing.assert_array_equal(pair.came, pair.sent)


def test_host_memory_that_home_registered_is_the_peer_s_without_reach(pair: Pair) -> None:
    _, on_peer = pair.streams()
    on_peer.copy(pieces((pair.host, pair.at_peer.address, SIZE)))
    on_peer.copy(pieces((pair.at_peer.address, pair.host + SIZE, SIZE)))
    assert pair.peer.finish(on_peer.record()) is None
    np.testing.assert_array_equal(pair.came, pair.sent)


def test_it_is_registered_once_for_both(pair: Pair) -> None:
    with pytest.raises(DeviceError) as caught:
        pair.peer.device.register_host(memoryview(pair.mapping), is_read_only=False)
    assert caught.value.fault is DeviceFault.REFUSED


# ------------------------------------------------------------------------------- what only fakes can show


@pytest.mark.parametrize("seed", range(5))
def test_a_forgotten_wait_across_devices_is_found(seed: int) -> None:
    """By the audit, whatever the schedule."""
    home, peer = fake_pair(seed)
    pair = Pair("fake", home, peer)
    assert peer.reach(home)
    on_home, on_peer = pair.streams()
    pair.fill_home(on_home)
    with pytest.raises(AssertionError, match="may not have written yet"):
        pair.fetch(on_peer)
    pair.close()


def test_home_s_memory_is_not_freed_under_a_peer_s_copy() -> None:
    home, peer = fake_pair()
    pair = Pair("fake", home, peer)
    assert peer.reach(home)
    _, on_peer = pair.streams()
    pair.fetch(on_peer)
    with pytest.raises(AssertionError, match="while a stream may still touch it"):
        home.free(DeviceMemory(pair.at_home.address, SIZE))
    pair.close()


@pytest.mark.parametrize("make", [lambda: fake_pair(has_peer_access=False), stubbed_pair])
def test_without_peer_access_it_says_so(make: object) -> None:
    home, peer = make()  # type: ignore[operator]
    for device in (home, peer):
        if not isinstance(device, FakeDevice):
            device.stub.fakes[device.index].has_peer_access = False
    assert not peer.reach(home)
    peer.shut_down()
    home.shut_down()


def test_a_peer_of_a_lost_device_is_refused_its_memory_and_goes_on() -> None:
    home, peer = fake_pair()
    pair = Pair("fake", home, peer)
    assert peer.reach(home)
    _, on_peer = pair.streams()
    home.lose()
    with pytest.raises(DeviceError) as caught:
        pair.fetch(on_peer)
    assert caught.value.fault is DeviceFault.REFUSED
    on_peer.copy(pieces((pair.host, pair.at_peer.address, SIZE)))  # still pinned
    assert pair.peer.finish(on_peer.record()) is None
    assert peer.peek(pair.at_peer.address, SIZE) == pair.sent.tobytes()
    assert peer.violations == []
    pair.close()


def test_a_peer_that_is_reading_a_device_that_is_lost_may_be_lost_with_it() -> None:
    home, peer = fake_pair()
    pair = Pair("fake", home, peer)
    assert peer.reach(home)
    _, on_peer = pair.streams()
    pair.fetch(on_peer)
    event = on_peer.record()
    home.lose()
    error = pair.peer.finish(event)
    assert error is not None
    assert error.fault is DeviceFault.LOST
    assert peer.violations == []
    pair.close()


def test_a_lost_peer_leaves_home_alone() -> None:
    home, peer = fake_pair()
    pair = Pair("fake", home, peer)
    assert peer.reach(home)
    on_home, on_peer = pair.streams()
    pair.fetch(on_peer)
    peer.lose()
    pair.fill_home(on_home)  # nothing of a lost device moves a byte: no order is needed
    assert pair.home.finish(on_home.record()) is None
    assert home.peek(pair.at_home.address, SIZE) == pair.sent.tobytes()
    assert home.violations == []
    pair.close()


def test_what_home_has_under_way_when_a_peer_is_lost_is_still_under_way() -> None:
    home, peer = fake_pair()
    pair = Pair("fake", home, peer)
    on_home, _ = pair.streams()
    pair.fill_home(on_home)
    peer.lose()
    with pytest.raises(AssertionError, match="while a stream may still touch it"):
        home.free(DeviceMemory(pair.at_home.address, SIZE))
    pair.close()
