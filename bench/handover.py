"""`python -m bench.handover [--rounds N]`: how long after prefill's last chunk decode has all of a prompt.

A prompt of Llama 3 8B (1,024 tokens, 128 MiB) is computed in chunks of 256 tokens, one every 100 ms, and put
as each is done. The other side waits for it with one get, and copies what lands. The tail is the time from
the end of the last chunk's computing until the last byte is where the engine wants it. In turns:

    one daemon      both engines are on one host
    two daemons     the decode host's daemon fetches from the prefill host's while the put there goes on
    asked last      the same, but decode hears of the prompt when prefill has ended, as behind a plain proxy

Prefill, both daemons and decode are processes of their own, over loopback. Every byte is compared.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvtier.clients import Client, ExpectedBlocks, Limits
from tests.ports import free_port

from .fleet import IDENTITY, NUM_BLOCKS, PROMPT_BYTES, START_S, daemon, data_of, names_of, touch
from .machine import print_machine

NUM_CHUNKS, CHUNK_S = 4, 0.1
LEAD_S = 0.2  # until the first chunk begins: both sides are ready then
PIECE_BYTES = 4 << 20  # of a put: what of it is stored travels while the rest is copied


def prefill(target: str) -> None:
    """In another process: put the prompts that stdin names, chunk by chunk, from the moment it says on."""
    with Client(target, limits=Limits(staging_bytes=256 << 20, piece_bytes=PIECE_BYTES)) as client:
        namespace = client.register(IDENTITY)
        print("ready", flush=True)
        for line in sys.stdin:
            number, began = line.split()
            names, data = names_of(int(number)), data_of(int(number)).reshape(NUM_BLOCKS, -1)
            size, late_s = NUM_BLOCKS // NUM_CHUNKS, 0.0
            for chunk in range(NUM_CHUNKS):
                first = chunk * size
                due = float(began) + (chunk + 1) * CHUNK_S
                late_s = max(late_s, time.monotonic() - due)
                time.sleep(max(0.0, due - time.monotonic()))
                parent = names[first - 1] if first else b""
                put = client.put(
                    namespace, names[first : first + size], data[first : first + size], parent=parent
                )
                assert put.complete
            print(f"{time.monotonic() - due:.6f} {late_s:.6f}", flush=True)


class Prefill:
    """The prefill engine's process."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-c", f"from bench.handover import prefill; prefill({target!r})"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._of = self.process.stdin, self.process.stdout
        self._of.readline()

    def begin(self, prompt: int) -> float:
        """Begin a prompt soon; return when, on the monotonic clock."""
        began = time.monotonic() + LEAD_S
        print(prompt, began, file=self._to, flush=True)
        return began

    def ended(self) -> float:
        """Return the seconds from the end of the last chunk until its put was acknowledged."""
        put_s, late_s = map(float, self._of.readline().split())
        if late_s > CHUNK_S / 4:
            print(f"prefill was {late_s * 1e3:.0f} ms late with a chunk: the machine is busy")
        return put_s

    def close(self) -> None:
        self._to.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover")
    parser.add_argument("--rounds", type=int, default=8, help="prompts in each of the three ways")
    num_rounds = parser.parse_args().rounds
    print_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-handover")))
        ports = [free_port() for _ in range(2)]
        gib = max(1, -(-3 * num_rounds * PROMPT_BYTES * 3 // 2 >> 30))
        near, far = (
            stack.enter_context(daemon(folder / name, port, ports, gib))
            for name, port in (("decode", ports[0]), ("prefill", ports[1]))
        )
        client = stack.enter_context(Client(near[0]))
        namespace = client.register(IDENTITY)
        beside, apart = (Prefill(target) for target in (near[0], far[0]))
        stack.callback(beside.close)
        stack.callback(apart.close)
        with Client(far[0]) as other:
            other.register(IDENTITY)
            epoch = other.info.epoch
        into = np.ones(PROMPT_BYTES, np.uint8)
        touch(client, near[0], namespace, 2 * num_rounds)

        def tail(
            prompt: int, engine: Prefill, expected: ExpectedBlocks, asks_last: bool
        ) -> tuple[float, float]:
            into[:] = 1
            began = engine.begin(prompt)
            last = began + NUM_CHUNKS * CHUNK_S
            time.sleep(max(0.0, (last if asks_last else began) - time.monotonic()))
            got = client.get(namespace, names_of(prompt), into=into, expected=expected, deadline_s=30.0)
            ended = time.monotonic()
            put_s = engine.ended()
            assert got.num_blocks == NUM_BLOCKS, f"{got.num_blocks} of {NUM_BLOCKS} blocks came"
            assert (into == data_of(prompt)).all(), "wrong bytes"
            return ended - last, put_s

        ends_at = time.monotonic() + START_S
        while True:  # until the hosts know each other
            with Client(near[0]) as probe:
                if probe.get(
                    namespace, names_of(0), expected=ExpectedBlocks(epoch=epoch, wait_s=0.5)
                ).num_blocks:
                    break
            if not apart_has(far[0]):
                apart.begin(0)
                apart.ended()
            assert time.monotonic() < ends_at, "the hosts did not find each other"
        ways = {
            "one daemon": (beside, ExpectedBlocks(), False),
            "two daemons": (apart, ExpectedBlocks(epoch=epoch), False),
            "two daemons, asked last": (apart, ExpectedBlocks(epoch=epoch), True),
        }
        tails: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(1, num_rounds + 1):
            for index, (way, (engine, expected, asks_last)) in enumerate(ways.items()):
                tails[way].append(tail(3 * number + index, engine, expected, asks_last))
        for way, measured in tails.items():
            took = sorted(one for one, _ in measured)
            puts = statistics.median(put_s for _, put_s in measured)
            print(
                f"{way:26}tail median {statistics.median(took) * 1e3:6.1f} ms  best {took[0] * 1e3:6.1f}  "
                f"worst {took[-1] * 1e3:6.1f}  (put of the last chunk {puts * 1e3:5.1f} ms)"
            )


def apart_has(target: str) -> bool:
    """Return whether the prefill host's daemon holds the first prompt."""
    with Client(target) as client:
        return client.lookup(client.register(IDENTITY), names_of(0)).num_blocks == NUM_BLOCKS


if __name__ == "__main__":
    main()
