"""A fake device with a decoder, or what hashes, on it, and memory there: for the tests of both."""

from collections.abc import Callable
from typing import Any

from kvtier.tiers.codecs.base import Codec, Shape
from kvtier.tiers.gpu.decode.records import Record
from kvtier.tiers.gpu.device.contract import DeviceMemory
from tests.fakes.gpu.device import FakeDevice

BEHIND = b"\xa5" * 16  # what stands behind the place of a fragment


class DeviceBench:
    """`decoder` is what `make` makes on the device."""

    def __init__(self, make: Callable[[FakeDevice], Any], seed: int = 0) -> None:
        self.device = FakeDevice(seed=seed)
        self.decoder = make(self.device)
        self.stream = self.device.take_stream()
        self._memory: list[DeviceMemory] = []

    def place(self, payload: bytes, num_bytes: int = 0) -> int:
        """Allocate device memory that begins with `payload`; the rest is what was there."""
        memory = self.device.allocate(max(num_bytes, len(payload)))
        self._memory.append(memory)
        self.device.poke(memory.address, payload + b"\xa5" * (num_bytes - len(payload)))
        return memory.address

    def finish(self) -> None:
        """Let the device's time pass, and learn of it as a copier does."""
        event = self.stream.record()
        self.device.run()
        assert event.is_done()
        self.device.recycle(event)

    def decode(self, codec: Codec, shape: Shape, stored: list[bytes]) -> tuple[list[int], list[bytes]]:
        """Decode records; return their status and what they became."""
        places = [(self.place(s), len(s), self.place(b"", shape.raw_bytes + len(BEHIND))) for s in stored]
        ticket = self.decoder.decode(self.stream, codec, shape, [Record(*place) for place in places])
        self.finish()
        decoded = [self.device.peek(raw, shape.raw_bytes + len(BEHIND)) for _, _, raw in places]
        assert all(raw.endswith(BEHIND) for raw in decoded), "wrote behind its place"
        return ticket.results().tolist(), [raw[: -len(BEHIND)] for raw in decoded]

    def close(self) -> None:
        """Give everything back, and see that nothing went wrong."""
        self.decoder.slabs.close()
        self.decoder.slabs.close()  # a second time is no harm
        self.device.give_stream(self.stream)
        for memory in self._memory:
            self.device.free(memory)
        self.device.shut_down()
        assert self.device.check_integrity() == self.device.left_behind == []
