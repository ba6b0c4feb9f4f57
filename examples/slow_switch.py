"""A switch in user space, where the kernel has no `netem`: frames arrive late, and some never.

Each host has a TAP device instead of one end of a veth pair; this process reads the frames that hosts send,
and hands them on after `--delay`, but for a share of `--loss`. So TCP sees what it would on such a network,
as far as this process keeps up. Ports are cut and mended by lines on stdin: `cut 2`, `mend 2`.

    python -m examples.slow_switch --delay 0.005 --loss 0.01 NAMESPACE NAMESPACE ...
"""

import argparse
import ctypes
import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from typing import Final

CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES: Final = 1 << 16
MAX_QUEUED: Final = 4096  # frames under way; the next one is lost, as at any switch
BURST: Final = 64  # frames of one port, before the next port has its turn
MANY: Final = 0x01  # of an address's first byte: it is for several stations


def open_tap(namespace: str, device: str) -> int:
    """Return the descriptor of a new TAP device in a network namespace. This thread is in it from then on."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(descriptor)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


class SlowSwitch:
    """Ports of one switch. `seed` decides which frames are lost."""

    def __init__(self, taps: list[int], delay_s: float, loss: float, seed: int = 1) -> None:
        self._taps, self._delay_s, self._loss = taps, delay_s, loss
        self._dice = random.Random(seed).random
        self._is_cut = [False] * len(taps)
        self._port_of: dict[bytes, int] = {}  # by address of the station
        self._under_way: deque[tuple[float, int, bytes]] = deque()  # all take equally long: in order

    def run(self) -> None:
        """Forward until stdin ends."""
        selector = selectors.DefaultSelector()
        for port, tap in enumerate(self._taps):
            selector.register(tap, selectors.EVENT_READ, port)
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        print("ready", flush=True)
        while True:
            wait_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for key, _ in selector.select(wait_s):
                if key.data is not None:
                    self._read(key.data)
                elif not self._obey(sys.stdin.readline()):
                    return
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                self._deliver(*self._under_way.popleft()[1:])

    def _obey(self, line: str) -> bool:
        verb, _, port = line.partition(" ")
        if verb:
            self._is_cut[int(port)] = verb == "cut"
        return bool(verb)

    def _read(self, port: int) -> None:
        due_at = time.monotonic() + self._delay_s
        for _ in range(BURST):
            try:
                frame = os.read(self._taps[port], FRAME_BYTES)
            except BlockingIOError:
                return
            self._port_of[frame[6:12]] = port
            if not self._is_cut[port] and len(self._under_way) < MAX_QUEUED and self._dice() >= self._loss:
                self._under_way.append((due_at, port, frame))

    def _deliver(self, source: int, frame: bytes) -> None:
        known = None if frame[0] & MANY else self._port_of.get(frame[:6])
        for port in range(len(self._taps)) if known is None else (known,):
            if port != source and not self._is_cut[port]:
                try:
                    os.write(self._taps[port], frame)
                except OSError:  # its device is down, or full
                    continue


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.slow_switch")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames")
    parser.add_argument("namespaces", nargs="+")
    arguments = parser.parse_args()
    taps = [open_tap(name, "eth0") for name in arguments.namespaces]
    SlowSwitch(taps, arguments.delay, arguments.loss).run()


if __name__ == "__main__":
    main()
