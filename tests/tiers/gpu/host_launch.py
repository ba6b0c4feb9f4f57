"""A launch of the kernel without CUDA: the copies that its columns say, in the fake device's own time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.tiers.gpu.device.contract import CopyPieces
from tests.fakes.gpu.device import FakeDevice


class HostLaunch:
    """Runs a launch as the copies that its columns say, in the fake device's own time."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.seen: list[int] = []

    def __call__(self, stream: Any, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        sources, targets, lengths, num_pieces = map(int, arguments)
        self.seen.append(num_pieces)
        raw = [self.device.peek(address, 8 * num_pieces) for address in (sources, targets, lengths)]
        columns = [np.frombuffer(r, kind) for r, kind in zip(raw, ("u8", "u8", "i8"), strict=True)]
        stream.copy(CopyPieces(*columns))
