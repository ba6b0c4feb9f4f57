"""`make demo-store`: a host computes, and is destroyed with its disk; another one answers out of the store.

All daemons share one object store, a folder by default: `python -m examples.demo_store s3://BUCKET/PREFIX`
and `mooncake://MASTER:PORT` take a real one. `mooncake` alone starts a pool of Mooncake Store with the memory
of three processes; one of them is killed then, and a third host answers from what is left.

Each host answers each prompt twice: without kvtier, and with what the first one left in the store. Both
answers must be the same, bit for bit. Exit code 1 when any is not, or nothing is reused.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.clients import Client, KvtierError
from kvtier.sources.objects.limits import BUNDLE_TOKENS, TARGET_BYTES

from .daemon import ExampleDaemon
from .demo import SETTINGS, Demo, DemoReader, Totals
from .mooncake_pool import MooncakeProcesses
from .screen import MIB, Screen
from .texts import READERS, turn_tokens

if TYPE_CHECKING:
    from kvtier.clients.transformers import TieredCache

STORE_S = 120.0  # within which exports and searches have to end
LOST_S = 5.0  # for which a host asks for what may be lost
POOL = "mooncake"
NUM_LENDERS = 3


class StoreDemo(Demo):
    """One host: a model, a daemon, a client of it. `patience_s`: asks so long for the whole of a prompt."""

    patience_s = 0.0

    def wait_until_stored(self, prompts: list[list[int]]) -> int:
        """Wait until the store has every whole bundle of some prompts; return the bytes that were sent."""
        num_wanted = len({name for tokens in prompts for name in self.bundles(tokens)})
        ends_at = time.monotonic() + STORE_S
        while True:
            source = self.daemon.status().source
            num_stored = source.exports["stored"] + source.exports["shared_already"]
            if num_stored >= num_wanted and not source.num_in_flight:
                return source.sent_bytes
            if time.monotonic() > ends_at:
                raise RuntimeError(
                    f"{num_stored} of {num_wanted} bundles are in the store after {STORE_S:g} s"
                )
            time.sleep(0.1)

    def load(self, tokens: list[int], session: str) -> tuple[float, "TieredCache"]:
        """Load as a runtime does that asked the daemon a moment before.
        A lookup waits for nothing: the first one of a prompt finds nothing yet, and begins the search."""
        num_tokens = len(self.bundles(tokens)) * self.bundle_blocks * self.store.block_tokens
        ends_at = time.monotonic() + self.patience_s
        while True:
            began_at, cache = super().load(tokens, session)
            if cache.reuse.num_tokens >= num_tokens or time.monotonic() >= ends_at:
                return began_at, cache
            time.sleep(0.05)

    @property
    def bundle_blocks(self) -> int:
        """Blocks of a bundle: as docs/bundle-format.md says."""
        num_blocks = BUNDLE_TOKENS // self.store.block_tokens
        while num_blocks > 1 and num_blocks * self.store.block_bytes > TARGET_BYTES:
            num_blocks //= 2
        return num_blocks

    def bundles(self, tokens: list[int]) -> list[str]:
        """Return the names of the whole bundles of a prompt."""
        size = self.bundle_blocks
        return [name.hex() for name in self.store.hashes(tokens)[size - 1 :: size]]


def main() -> int:
    """Run the demo; return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    screen = Screen()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-store-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            url = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}"
            pool = stack.enter_context(MooncakeProcesses(folder, NUM_LENDERS)) if url == POOL else None
            return play(screen, url if pool is None else f"mooncake://{pool.address}", pool)
        except KeyboardInterrupt:
            screen.say("\nstopped; the daemons are down and their folders removed")
            return 130
        except (RuntimeError, KvtierError) as problem:
            screen.say(f"\nthe demo failed: {problem}", "red")
            return 1


def play(screen: Screen, url: str, pool: MooncakeProcesses | None) -> int:
    """Run the demonstration; return the exit code."""
    screen.say(f"kvtier demo: hosts and the store that they share, {url}", "bold")
    screen.title("1. The first host computes, and stores what it computed for others.")
    with host(screen, url) as first:
        prompts = [_prompt(first, reader) for reader in first.readers]
        began_at = time.perf_counter()
        sent_bytes = first.wait_until_stored(prompts)
        stored_s = time.perf_counter() - began_at
        screen.say(f"{sent_bytes / MIB:.0f} MiB are in the store {stored_s:.1f} s later", "dim")
        first.daemon.stop(signal.SIGKILL)
    screen.say("it was killed (kill -9), and its memory and disk are gone", "dim")

    screen.title("2. The second host starts with an empty disk, and is asked the same.")
    second, num_fetched = _ask(screen, url, STORE_S)
    num_different = first.totals.num_different + second.num_different
    if pool is not None:
        pool.lenders[0].kill()
        screen.title(
            f"3. One of the {NUM_LENDERS} lenders of memory is killed. A third host is asked the same."
        )
        third, _ = _ask(screen, url, LOST_S)
        num_different += third.num_different
    if num_different:
        screen.say(f"{num_different} answers DIFFER from a run without kvtier", "red")
    else:
        screen.say("all answers are those of a run without kvtier, logits bit for bit", "green")
    return 1 if num_different or not num_fetched else 0


@contextmanager
def host(screen: Screen, url: str) -> Iterator[StoreDemo]:
    """A host with empty memory and an empty disk, which shares the store at `url`."""
    settings = [*SETTINGS, f"object.url={url}", "object.share=eager"]
    with ExampleDaemon(settings) as daemon, Client(daemon.target, name="host") as client:
        with screen.busy("starting the daemon, importing torch, building the model"):
            daemon.start()
            demo = StoreDemo(screen, daemon, client, min(2, os.cpu_count() or 1))
            demo.model.prefill(turn_tokens("warm up"), demo.model.new_cache())
        screen.header()
        yield demo


def _ask(screen: Screen, url: str, patience_s: float) -> tuple[Totals, int]:
    """Ask a new host the first question of each reader; return what happened, and the blocks it fetched."""
    with host(screen, url) as demo:
        demo.patience_s = patience_s
        for reader in demo.readers:
            demo.turn(reader)
        status = demo.daemon.status()
        screen.tiers(status)
    totals, num_fetched = demo.totals, status.source.num_blocks_fetched
    screen.say(
        f"{num_fetched * demo.store.block_tokens:,} tokens were read from the store, each block once; "
        f"{totals.without_s:.1f} s of prefill became {totals.with_s:.1f} s"
    )
    return totals, num_fetched


def _prompt(demo: StoreDemo, reader: DemoReader) -> list[int]:
    """Answer the first question of a reader; return the tokens of its prompt."""
    tokens = reader.tokens + turn_tokens(READERS[reader.name][0])
    demo.turn(reader)
    return tokens


if __name__ == "__main__":
    raise SystemExit(main())
