"""The fake device is late, strict, and notices what a GPU would make somebody pay for weeks later."""

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault, DeviceMemory, Event, Stream
from tests.contracts.devices import pieces
from tests.fakes.gpu.device import FakeDevice

SIZE = 4096


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice()
    yield made
    made.shut_down()


def take(device: FakeDevice) -> Stream:
    stream = device.take_stream()
    return stream


def test_a_copy_reads_what_is_there_at_its_own_time(device: FakeDevice) -> None:
    memory = device.allocate(2 * SIZE)
    device.poke(memory.address, b"early")
    take(device).copy(pieces((memory.address, memory.address + SIZE, 5)))
    device.poke(memory.address, b"later")
    assert device.peek(memory.address + SIZE, 5) == bytes(5), "nothing happens before its time"
    device.run()
    assert device.peek(memory.address + SIZE, 5) == b"later"


def test_without_a_wait_some_schedule_gives_wrong_bytes() -> None:
    seen = set()
    for seed in range(40):
        device = FakeDevice(seed=seed)
        memory = device.allocate(3 * SIZE)
        device.poke(memory.address, b"right")
        take(device).copy(pieces((memory.address, memory.address + SIZE, 5)))
        with pytest.raises(AssertionError, match="may not have written yet"):
            take(device).copy(pieces((memory.address + SIZE, memory.address + 2 * SIZE, 5)))
        seen.add(len(device.check_integrity()))
        device.shut_down()
    assert seen == {1}, "the audit says so under every seed"


def test_completion_is_told_late_and_once(device: FakeDevice) -> None:
    stream, told = take(device), list[DeviceError | None]()
    event = stream.record()
    assert not event.is_done()
    device.when_done(event, told.append)
    assert told == []
    device.run()
    assert told == [None]
    device.recycle(event)


def freed(device: FakeDevice, memory: DeviceMemory, stream: Stream) -> None:
    device.free(memory)


def written_unordered(device: FakeDevice, memory: DeviceMemory, stream: Stream) -> None:
    take(device).copy(pieces((memory.address + SIZE, memory.address + 2 * SIZE, 1)))


def read_unordered(device: FakeDevice, memory: DeviceMemory, stream: Stream) -> None:
    take(device).copy(pieces((memory.address + 2 * SIZE, memory.address, 1)))


@pytest.mark.parametrize("act", [freed, written_unordered, read_unordered])
@pytest.mark.parametrize("has_happened", [False, True])
def test_what_the_host_cannot_know_to_be_over_is_not_over(
    device: FakeDevice, act: Callable[[FakeDevice, DeviceMemory, Stream], None], has_happened: bool
) -> None:
    memory, stream = device.allocate(3 * SIZE), take(device)
    stream.copy(pieces((memory.address + 2 * SIZE, memory.address + SIZE, SIZE)))
    event = stream.record()
    if has_happened:
        device.run()  # but nobody asked: being lucky is no order
    if act is read_unordered:
        stream.copy(pieces((memory.address, memory.address + 2 * SIZE, SIZE)))
    with pytest.raises(AssertionError):
        act(device, memory, stream)
    assert len(device.check_integrity()) == 1
    with pytest.raises(DeviceError) as caught:
        event.is_done()
    assert caught.value.fault is DeviceFault.LOST


def test_knowing_makes_it_right(device: FakeDevice) -> None:
    memory, stream = device.allocate(3 * SIZE), take(device)
    stream.copy(pieces((memory.address + 2 * SIZE, memory.address + SIZE, SIZE)))
    event = stream.record()
    device.run()
    assert event.is_done()
    device.recycle(event)
    written_unordered(device, memory, stream)
    device.run()
    assert device.check_integrity() == []


def test_misuse_is_named(device: FakeDevice) -> None:
    def misuse(expected: str, act: Callable[[FakeDevice], object]) -> None:
        victim = FakeDevice()
        with pytest.raises(AssertionError, match=expected):
            act(victim)
        assert victim.check_integrity() != []
        victim.shut_down()

    def free_twice(device: FakeDevice) -> None:
        memory = device.allocate(SIZE)
        device.free(memory)
        device.free(memory)

    def recycle_twice(device: FakeDevice) -> None:
        event = take(device).record()
        device.recycle(event)
        device.recycle(event)

    def use_recycled(device: FakeDevice) -> None:
        event = take(device).record()
        device.recycle(event)
        take(device).wait(event)

    def copy_to(target: int, length: int) -> Callable[[FakeDevice], None]:
        def act(device: FakeDevice) -> None:
            memory = device.allocate(SIZE)
            take(device).copy(pieces((memory.address, memory.address + target, length)))

        return act

    def overlap(device: FakeDevice) -> None:
        start = device.allocate(SIZE).address
        take(device).copy(pieces((start, start + 1000, 100), (start + 200, start + 1099, 100)))

    def write_read_only(device: FakeDevice) -> None:
        start = device.allocate(SIZE).address
        host = device.register_host(memoryview(bytearray(100)), is_read_only=True)
        take(device).copy(pieces((start, host, 10)))

    misuse("is no device memory", free_twice)
    misuse("recycled twice", recycle_twice)
    misuse("used after", use_recycled)
    misuse("target .* in no usable region", copy_to(SIZE, 1))
    misuse("target .* in no usable region", copy_to(SIZE - 1, 2))
    misuse("in no usable region", write_read_only)
    misuse("is a source of it", copy_to(10, 20))
    misuse("two targets of one call overlap", overlap)


def test_registering_has_a_limit() -> None:
    device = FakeDevice(max_registered_bytes=SIZE)
    address = device.register_host(memoryview(bytearray(SIZE)), is_read_only=False)
    with pytest.raises(DeviceError, match="memlock") as caught:
        device.register_host(memoryview(bytearray(1)), is_read_only=False)
    assert caught.value.fault is DeviceFault.REFUSED
    device.unregister_host(address)
    device.register_host(memoryview(bytearray(1)), is_read_only=False)
    device.shut_down()


def test_a_lost_device_tells_everybody_and_takes_things_back(device: FakeDevice) -> None:
    memory, stream, told = device.allocate(2 * SIZE), take(device), list[DeviceError | None]()
    host = device.register_host(memoryview(bytearray(SIZE)), is_read_only=False)
    stream.copy(pieces((memory.address, memory.address + SIZE, SIZE)))
    event = stream.record()
    device.when_done(event, told.append)
    device.lose("test")
    for act in (lambda: device.allocate(1), lambda: stream.record(), event.is_done, device.take_stream):
        with pytest.raises(DeviceError) as caught:
            act()
        assert caught.value.fault is DeviceFault.LOST
    device.run()
    assert [error.fault for error in told if error] == [DeviceFault.LOST]
    device.recycle(event)
    device.give_stream(stream)
    device.unregister_host(host)
    device.free(memory)
    assert device.check_integrity() == []


def test_two_devices_of_one_process_share_memory_and_order() -> None:
    ours, theirs = FakeDevice(0, may_wait_abroad=True), FakeDevice(1)
    memory = ours.allocate(SIZE)
    mapped = theirs.open(ours.export(memory), SIZE)
    event, handle = theirs.export_event()
    scratch = theirs.allocate(SIZE)
    theirs.poke(scratch.address, b"shared")
    writer = take(theirs)
    writer.copy(pieces((scratch.address, mapped.address, 6)))
    writer.record(event)
    opened = ours.open_event(handle)
    copy = ours.allocate(SIZE)
    reader = take(ours)
    reader.wait(opened)
    reader.copy(pieces((memory.address, copy.address, 6)))
    ours.run()
    assert ours.peek(copy.address, 6) == bytes(6), "it waits for the other device"
    theirs.run()
    ours.recycle(opened)
    ours.run()
    assert ours.peek(copy.address, 6) == b"shared"
    assert event.is_done()
    theirs.close(mapped)
    handle = ours.export(memory)
    with pytest.raises(DeviceError, match="does not share it"):
        theirs.open(handle[:12] + b"\xff" * 4 + handle[16:], SIZE)
    with pytest.raises(DeviceError, match="are shared"):
        theirs.open(ours.export(memory), 1 << 30)
    theirs.shut_down()
    ours.shut_down()


def test_what_a_killed_process_had_recorded_is_never_done(device: FakeDevice) -> None:
    """As CUDA reportedly leaves it. Whoever waits on the host can stop; a stream could not."""
    program = (
        "import sys; from tests.fakes.gpu.device import FakeDevice; d = FakeDevice(); s = d.take_stream()\n"
        "event, handle = d.export_event(); s.record(event)\n"
        "print(handle.hex(), flush=True); sys.stdin.read()"  # its time never comes
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        event = device.open_event(bytes.fromhex(child.stdout.readline().decode()))
        child.kill()
    told: list[DeviceError | None] = []
    give_up = device.when_done(event, told.append)
    device.run()
    assert not event.is_done()
    assert told == []
    give_up()
    device.run()
    assert [error.fault for error in told if error] == [DeviceFault.REFUSED]
    give_up()  # again: no effect
    device.recycle(event)


def test_a_stream_that_waits_for_another_process_is_a_violation() -> None:
    ours, theirs = FakeDevice(), FakeDevice(1)
    _, handle = theirs.export_event()
    with pytest.raises(AssertionError, match="another process, which may be killed"):
        take(ours).wait(ours.open_event(handle))


def test_closing_waits_until_a_live_device_is_idle() -> None:
    ours, theirs = FakeDevice(is_live=True, may_wait_abroad=True), FakeDevice(1)
    mapped = ours.open(theirs.export(theirs.allocate(SIZE)), SIZE)
    event, handle = theirs.export_event()
    take(theirs).record(event)
    take(ours).wait(ours.open_event(handle))  # and what is behind it
    closing = threading.Thread(target=ours.close, args=(mapped,))
    closing.start()
    assert mapped.address in ours.memory.regions
    theirs.run()
    closing.join()
    assert mapped.address not in ours.memory.regions
    ours.shut_down()
    assert ours.check_integrity() == []


def test_a_call_on_an_event_loops_thread_is_a_violation() -> None:
    device = FakeDevice()
    device.no_calls_on = threading.get_ident()
    take(device)  # the pool is ours, not the driver's
    with pytest.raises(AssertionError, match="allocate on an event loop's thread"):
        device.allocate(SIZE)


NUM_CELLS = 6
Program = list[tuple[int, int, int]]  # stream, source cell, target cell


def programs() -> st.SearchStrategy[Program]:
    cell = st.integers(0, NUM_CELLS - 1)
    step = st.tuples(st.integers(0, 2), cell, cell).filter(lambda step: step[1] != step[2])
    return st.lists(step, max_size=12)


def play(device: FakeDevice, program: Program, random_: random.Random, skip: int = -1) -> list[int]:
    """Run `program`, each step waiting for those before it that it conflicts with, but the `skip`th step."""
    memory = device.allocate(NUM_CELLS)
    device.poke(memory.address, bytes(range(NUM_CELLS)))
    streams = [take(device) for _ in range(3)]
    done: list[tuple[int, int, int, Event]] = []
    for number, (stream, source, target) in enumerate(program):
        for other, read, written, event in done:
            is_conflict = target in (read, written) or source == written
            if is_conflict and other != stream and number != skip:
                streams[stream].wait(event)
        streams[stream].copy(pieces((memory.address + source, memory.address + target, 1)))
        done.append((stream, source, target, streams[stream].record()))
        for _ in range(random_.randrange(3)):
            device.step()
    device.run()
    return list(device.peek(memory.address, NUM_CELLS))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(program=programs(), seed=st.integers(0, 1 << 16))
def test_an_ordered_program_gives_the_same_under_every_schedule(program: Program, seed: int) -> None:
    device = FakeDevice(seed=seed)
    expected = list(range(NUM_CELLS))
    for _, source, target in program:
        expected[target] = expected[source]
    assert play(device, program, random.Random(seed)) == expected
    assert device.check_integrity() == []
    device.shut_down()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(program=programs(), skip=st.integers(0, 11), seed=st.integers(0, 1 << 16))
def test_a_program_that_goes_wrong_was_refused(program: Program, skip: int, seed: int) -> None:
    """Whatever a missing wait could spoil, the audit names before it happens."""
    device = FakeDevice(seed=seed)
    expected = list(range(NUM_CELLS))
    for _, source, target in program:
        expected[target] = expected[source]
    try:
        found = play(device, program, random.Random(seed), skip)
    except AssertionError:
        assert len(device.check_integrity()) == 1
    else:
        assert found == expected
    device.shut_down()


def test_the_same_seed_is_the_same_schedule() -> None:
    def trace(seed: int) -> list[bytes]:
        device = FakeDevice(seed=seed)
        memory = device.allocate(2 * SIZE)
        device.poke(memory.address, bytes(range(64)))
        for start in range(0, 64, 16):
            parts = [(memory.address + i, memory.address + SIZE + i, 1) for i in range(start, start + 16)]
            take(device).copy(pieces(*parts))
        states = []
        while device.step():
            states.append(device.peek(memory.address + SIZE, 64))
        device.shut_down()
        return states

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
    assert np.all(np.frombuffer(trace(1)[-1], np.uint8) == np.arange(64))
