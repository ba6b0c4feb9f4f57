"""What every device promises: work in order where order was asked for, completion told, limits kept."""

import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault, DeviceMemory, Stream
from tests.contracts.devices import FACTORIES, DeviceCase, exported, pieces

ROOT = Path(__file__).resolve().parents[2]
SIZE = 1 << 20
PARAMS = [pytest.param(kind, marks=pytest.mark.gpu if kind == "cuda" else ()) for kind in FACTORIES]


@pytest.fixture(params=PARAMS)
def case(request: pytest.FixtureRequest) -> Iterator[DeviceCase]:
    try:
        device = FACTORIES[request.param]()
    except DeviceError as error:
        assert request.param == "cuda"
        pytest.skip(str(error))
    yield DeviceCase(request.param, device)
    device.shut_down()
    assert getattr(device, "violations", []) == []


@pytest.fixture
def stream(case: DeviceCase) -> Iterator[Stream]:
    taken = case.device.take_stream()
    assert taken is not None
    yield taken
    case.device.give_stream(taken)


class Host:
    """Pinned host memory of `SIZE` bytes."""

    def __init__(self, case: DeviceCase, seed: int = 0) -> None:
        self.case = case
        self.mapping = mmap.mmap(-1, SIZE)
        self.bytes = np.frombuffer(self.mapping, np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        self.address = case.device.register_host(memoryview(self.mapping), is_read_only=False)

    def close(self) -> None:
        self.case.device.unregister_host(self.address)
        self.case.device.unregister_host(self.address)  # again: no effect


@pytest.fixture
def hosts(case: DeviceCase) -> Iterator[tuple[Host, Host]]:
    both = Host(case, 1), Host(case, 2)
    yield both
    for host in both:
        host.close()


def test_bytes_go_there_and_back(case: DeviceCase, stream: Stream, hosts: tuple[Host, Host]) -> None:
    source, target = hosts
    memory = case.device.allocate(SIZE)
    assert memory.address % 512 == 0
    stream.copy(pieces((source.address, memory.address, SIZE)))
    stream.copy(pieces((memory.address, target.address, SIZE)))  # the same stream: in this order
    assert case.finish(stream.record()) is None
    np.testing.assert_array_equal(target.bytes, source.bytes)
    case.device.free(memory)


def test_many_small_pieces_of_one_call(case: DeviceCase, stream: Stream, hosts: tuple[Host, Host]) -> None:
    source, target = hosts
    memory = case.device.allocate(SIZE)
    length = SIZE // 1000
    order = np.random.default_rng(3).permutation(1000).tolist()
    there = [
        (source.address + i * length, memory.address + to * length, length) for i, to in enumerate(order)
    ]
    back = [(to, target.address + at - source.address, length) for at, to, _ in there]
    stream.copy(pieces(*there))
    stream.copy(pieces(*back))
    assert case.finish(stream.record()) is None
    np.testing.assert_array_equal(target.bytes[: 1000 * length], source.bytes[: 1000 * length])
    case.device.free(memory)


def test_the_columns_may_change_once_they_were_handed_over(
    case: DeviceCase, stream: Stream, hosts: tuple[Host, Host]
) -> None:
    source, target = hosts
    columns = pieces((source.address, target.address, 1000))
    stream.copy(columns)
    columns.targets[0] = 0
    assert case.finish(stream.record()) is None
    np.testing.assert_array_equal(target.bytes[:1000], source.bytes[:1000])


def test_a_wait_orders_two_streams(case: DeviceCase, stream: Stream, hosts: tuple[Host, Host]) -> None:
    source, target = hosts
    memory = case.device.allocate(SIZE)
    other = case.device.take_stream()
    for _ in range(5):
        target.bytes[:] = 0
        stream.copy(pieces(*[(source.address + i, memory.address + i, 16384) for i in range(0, SIZE, 16384)]))
        written = stream.record()
        other.wait(written)
        case.device.recycle(written)  # a wait that was enqueued does not need it any more
        other.copy(pieces(*[(memory.address + i, target.address + i, 32768) for i in range(0, SIZE, 32768)]))
        read = other.record()
        stream.wait(read)  # the next round writes what this one reads
        assert case.finish(read) is None
        np.testing.assert_array_equal(target.bytes, source.bytes)
    case.device.give_stream(other)
    case.device.free(memory)


def test_an_event_can_be_asked(case: DeviceCase, stream: Stream) -> None:
    event = stream.record()
    later = stream.record()
    assert case.finish(later) is None
    assert event.is_done(), "it was recorded before one that is done"
    case.device.recycle(event)


def test_an_event_that_was_never_recorded_holds_nobody_up(case: DeviceCase, stream: Stream) -> None:
    event, _ = case.device.export_event()
    stream.wait(event)
    assert case.finish(stream.record()) is None
    case.device.recycle(event)


def test_an_exported_event_is_recorded_again_and_again(case: DeviceCase, stream: Stream) -> None:
    event, handle = case.device.export_event()
    assert len(handle) == 64
    for _ in range(3):
        assert stream.record(event) is event
        assert case.finish(stream.record()) is None
        assert event.is_done()
    case.device.recycle(event)


def test_streams_are_a_bounded_pool(case: DeviceCase) -> None:
    taken: list[Stream] = []
    with pytest.raises(DeviceError) as caught:
        taken.extend(case.device.take_stream() for _ in range(65))
    assert caught.value.fault is DeviceFault.OCCUPIED
    case.device.give_stream(taken[0])
    assert case.device.take_stream() is taken[0]
    for stream in taken:
        case.device.give_stream(stream)


def test_there_are_as_many_events_as_are_taken(case: DeviceCase, stream: Stream) -> None:
    """Each is done when what was enqueued before it is, and can be recorded again."""
    events = [case.device.take_event() for _ in range(1000)]
    assert len(set(map(id, events))) == 1000
    for _ in range(2):
        for event in events:
            assert stream.record(event) is event
        assert case.wait(events[-1]) is None
        assert all(event.is_done() for event in events)
    for event in events:
        case.device.recycle(event)


def test_more_memory_than_there_is(case: DeviceCase) -> None:
    with pytest.raises(DeviceError) as caught:
        case.device.allocate(1 << 50)
    assert caught.value.fault is DeviceFault.OUT_OF_MEMORY
    case.device.free(case.device.allocate(SIZE))  # it still works


def test_memory_is_registered_once(case: DeviceCase, hosts: tuple[Host, Host]) -> None:
    with pytest.raises(DeviceError) as caught:
        case.device.register_host(memoryview(hosts[0].mapping), is_read_only=False)
    assert caught.value.fault is DeviceFault.REFUSED


def test_memory_that_may_only_be_read(case: DeviceCase, stream: Stream, hosts: tuple[Host, Host]) -> None:
    """Refused where the device cannot; everything else works all the same."""
    mapping = mmap.mmap(-1, SIZE)
    np.frombuffer(mapping, np.uint8)[:] = np.arange(SIZE, dtype=np.uint8)
    try:
        source = case.device.register_host(memoryview(mapping), is_read_only=True)
    except DeviceError as error:
        if case.kind != "cuda" or error.fault is not DeviceFault.REFUSED:
            raise
        pytest.skip(str(error))
    stream.copy(pieces((source, hosts[0].address, SIZE)))
    assert case.finish(stream.record()) is None
    np.testing.assert_array_equal(hosts[0].bytes, np.arange(SIZE, dtype=np.uint8))
    case.device.unregister_host(source)


@pytest.mark.parametrize("handle", [b"", b"short", b"\xff" * 64])
def test_a_forged_handle_is_refused(case: DeviceCase, handle: bytes) -> None:
    with pytest.raises(DeviceError) as caught:
        case.device.open(handle, SIZE)
    assert caught.value.fault is DeviceFault.REFUSED
    with pytest.raises(DeviceError) as caught:
        case.device.open_event(handle)
    assert caught.value.fault is DeviceFault.REFUSED


def test_another_process_writes_our_memory_and_says_when(
    case: DeviceCase, stream: Stream, hosts: tuple[Host, Host]
) -> None:
    memory: DeviceMemory = case.device.allocate(SIZE)
    handle = exported(case.device, memory)
    command = [sys.executable, "-m", "tests.contracts.device_child", case.kind, handle.hex(), str(SIZE)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        event = case.device.open_event(bytes.fromhex(child.stdout.readline()))
        case.wait(event)
        stream.copy(pieces((memory.address, hosts[0].address, SIZE)))
        assert case.finish(stream.record()) is None
        np.testing.assert_array_equal(hosts[0].bytes, np.arange(SIZE, dtype=np.uint8))
        case.device.recycle(event)
        child.stdin.close()
        assert child.wait(120) == 0
    case.device.free(memory)


def test_the_end(case: DeviceCase, stream: Stream) -> None:
    told: list[DeviceError | None] = []
    case.device.when_done(stream.record(), told.append)
    case.device.allocate(SIZE)
    case.device.shut_down()
    case.device.shut_down()
    assert told == [None], "what was under way was finished first"
    with pytest.raises(DeviceError) as caught:
        case.device.allocate(SIZE)
    assert caught.value.fault is DeviceFault.LOST
