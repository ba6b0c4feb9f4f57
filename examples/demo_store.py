"""`make demo-store`: a host computes, and is destroyed with its disk; another one answers out of the store.

Both daemons share one object store, a folder by default: `python -m examples.demo_store s3://BUCKET/PREFIX`
takes a real one. The second host answers each prompt twice: without kvtier, and with what the first one left
in the store. Both answers must be the same, bit for bit. Exit code 1 when any is not, or nothing is reused.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.clients import Client, KvtierError
from kvtier.sources.objects.limits import BUNDLE_TOKENS, TARGET_BYTES
from kvtier.sources.objects.store import ObjectStore

from .daemon import ExampleDaemon
from .demo import SETTINGS, Demo, DemoReader
from .screen import MIB, Screen
from .texts import READERS, turn_tokens

if TYPE_CHECKING:
    from kvtier.clients.transformers import TieredCache

STORE_S = 120.0  # within which exports and searches have to end


class StoreDemo(Demo):
    """One host: a model, a daemon, a client of it. `expects_hits`: the store has what is asked for."""

    expects_hits = False

    def wait_until_stored(self, store: ObjectStore, prompts: list[list[int]]) -> int:
        """Wait until the store has every whole bundle of some prompts; return its bytes."""
        wanted = {name for tokens in prompts for name in self.bundles(tokens)}
        ends_at = time.monotonic() + STORE_S
        while True:
            found = {one.key.rpartition("/")[2]: one.num_bytes for one in store.objects("v1/b/")}
            if wanted <= found.keys():
                return sum(found[name] for name in wanted)
            if time.monotonic() > ends_at:
                raise RuntimeError(f"{len(wanted - found.keys())} bundles were not stored in {STORE_S:g} s")
            time.sleep(0.1)

    def load(self, tokens: list[int], session: str) -> tuple[float, "TieredCache"]:
        """Load as a runtime does that asked the daemon a moment before.
        A lookup waits for nothing: the first one of a prompt finds nothing yet, and begins the search."""
        num_tokens = len(self.bundles(tokens)) * self.bundle_blocks * self.store.block_tokens
        ends_at = time.monotonic() + (STORE_S if self.expects_hits else 0.0)
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
    folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-store-"))
    url = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}"
    try:
        return play(screen, url)
    except KeyboardInterrupt:
        screen.say("\nstopped; the daemons are down and their folders removed")
        return 130
    except (RuntimeError, KvtierError) as problem:
        screen.say(f"\nthe demo failed: {problem}", "red")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def play(screen: Screen, url: str) -> int:
    """Run the demonstration; return the exit code."""
    settings = [*SETTINGS, f"object.url={url}", "object.share=eager"]
    num_threads = min(2, os.cpu_count() or 1)
    store = ObjectStore(url)
    screen.say(f"kvtier demo: two hosts and the store that they share, {url}", "bold")

    screen.title("1. The first host computes, and stores what it computed for others.")
    with ExampleDaemon(settings) as daemon, Client(daemon.target, name="first host") as client:
        with screen.busy("starting the daemon, importing torch, building the model"):
            daemon.start()
            first = StoreDemo(screen, daemon, client, num_threads)
            first.model.prefill(turn_tokens("warm up"), first.model.new_cache())
        screen.header()
        prompts = [_prompt(first, reader) for reader in first.readers]
        began_at = time.perf_counter()
        stored_bytes = first.wait_until_stored(store, prompts)
        screen.say(
            f"{stored_bytes / MIB:.0f} MiB are in the store {time.perf_counter() - began_at:.1f} s later",
            "dim",
        )
        daemon.stop(signal.SIGKILL)
    screen.say("it was killed (kill -9), and its memory and disk are gone", "dim")

    screen.title("2. The second host starts with an empty disk, and is asked the same.")
    with ExampleDaemon(settings) as daemon, Client(daemon.target, name="second host") as client:
        with screen.busy("starting the daemon, building the model"):
            daemon.start()
            second = StoreDemo(screen, daemon, client, num_threads)
            second.model.prefill(turn_tokens("warm up"), second.model.new_cache())
        screen.header()
        reused_tokens = 0
        second.expects_hits = True
        for reader in second.readers:
            reused_tokens += second.turn(reader)
        screen.tiers(daemon.status())
        totals = second.totals
    num_different = first.totals.num_different + totals.num_different
    screen.say(
        f"{reused_tokens:,} tokens were not computed again: they came from the store, what the prompts share "
        f"once; {totals.without_s:.1f} s of prefill became {totals.with_s:.1f} s"
    )
    if num_different:
        screen.say(f"{num_different} answers DIFFER from a run without kvtier", "red")
    else:
        screen.say("all answers are those of a run without kvtier, logits bit for bit", "green")
    return 1 if num_different or not reused_tokens else 0


def _prompt(demo: StoreDemo, reader: DemoReader) -> list[int]:
    """Answer the first question of a reader; return the tokens of its prompt."""
    tokens = reader.tokens + turn_tokens(READERS[reader.name][0])
    demo.turn(reader)
    return tokens


if __name__ == "__main__":
    raise SystemExit(main())
