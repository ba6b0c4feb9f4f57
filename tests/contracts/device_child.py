"""Another process for test_devices.py: opens memory by its handle, writes it, and exports the event that says
so."""

import mmap
import sys

import numpy as np

from tests.contracts.devices import FACTORIES, DeviceCase, pieces


def main(kind: str, handle: str, num_bytes: int) -> None:
    """Print the event's handle once it is recorded; live until standard input ends."""
    case = DeviceCase(kind, FACTORIES[kind]())
    device = case.device
    memory = device.open(bytes.fromhex(handle), num_bytes)
    mapping = mmap.mmap(-1, num_bytes)
    np.frombuffer(mapping, np.uint8)[:] = np.arange(num_bytes, dtype=np.uint8)
    source = device.register_host(memoryview(mapping), is_read_only=False)
    stream = device.take_stream()
    event, shared = device.export_event()
    stream.copy(pieces((source, memory.address, num_bytes)))
    stream.record(event)
    finished = stream.record()
    print(shared.hex(), flush=True)
    assert case.finish(finished) is None
    device.close(memory)
    device.unregister_host(source)
    sys.stdin.read()
    device.recycle(event)
    device.shut_down()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
