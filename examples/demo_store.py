"""`make demo-store`: a host computes, and is destroyed with its disk; another one answers out of the store.

All daemons share one object store, a folder by default: `python -m examples.demo_store s3://BUCKET/PREFIX`
and `mooncake://MASTER:PORT` take a real one. `ceph` starts Ceph's gateway, where that is installed;
`mooncake` a pool of Mooncake Store with the memory of three processes, of which one is killed then, and a
third host answers from what is left. Otherwise a third host runs beside the second one, and what both compute
is stored once.

Each host answers each prompt twice: without kvtier, and with what the first one left in the store. Both
answers must be the same, bit for bit. Exit code 1 when any is not, or nothing is reused. `--picture FILE`
writes what was printed as an SVG.
"""

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.clients import Client
from kvtier.v1.bundles import BUNDLE_TOKENS, TARGET_BYTES

from .daemon import ExampleDaemon
from .demo import SETTINGS, Demo, perform
from .mooncake_pool import MooncakeProcesses
from .screen import MIB, Screen
from .texts import turn_tokens

STORE_S = 120.0  # within which exports and searches have to end
LOST_S = 5.0  # for which a host asks for what may be lost
POOL, CEPH = "mooncake", "ceph"
BUCKET = "demo"
NUM_LENDERS = 3


class StoreDemo(Demo):
    """One host: a model, a daemon, a client of it."""

    num_fetched = 0  # blocks, from the store

    def wait_until_stored(self, names: set[str]) -> int:
        """Wait until this host has stored bundles of these names, or found them to be there; return the bytes
        that were sent."""
        num_wanted = len(names)
        ends_at = time.monotonic() + STORE_S
        while True:
            source = self.daemon.status().source
            num_stored = sum(_num_exported(self))
            if num_stored >= num_wanted and not source.num_in_flight:
                return source.sent_bytes
            if time.monotonic() > ends_at:
                words = f"{num_stored} of {num_wanted} bundles are in the store after {STORE_S:g} s"
                raise RuntimeError(f"{words}: {source.exports}")
            time.sleep(0.1)

    def loadable_tokens(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt the store may have: those of its whole bundles."""
        return len(self.bundles(tokens)) * self.bundle_blocks * self.store.block_tokens

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
    parser = argparse.ArgumentParser(prog="python -m examples.demo_store")
    parser.add_argument("store", nargs="?", help=f"address of a store, {CEPH} or {POOL}; default: a folder")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write what was printed as an SVG")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-store-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = arguments.store or f"file://{folder}"
        return perform(
            lambda screen: play(screen, store, folder, stack), arguments.picture, "make demo-store"
        )


def play(screen: Screen, store: str, folder: Path, stack: ExitStack) -> int:
    """Run the demonstration; return the exit code."""
    pool, url = None, store
    if store == POOL:
        pool = stack.enter_context(MooncakeProcesses(folder, NUM_LENDERS))
        url = f"mooncake://{pool.address}"
    elif store == CEPH:
        url = _ceph(folder, stack)
    screen.say(f"kvtier demo: hosts and the store that they share, {url}", "bold")
    screen.title("1. The first host computes, and stores what it computed for others.")
    with host(screen, url) as first:
        names = _compute([first])
        began_at = time.perf_counter()
        sent_bytes = first.wait_until_stored(names)
        stored_s = time.perf_counter() - began_at
        screen.say(f"{sent_bytes / MIB:.0f} MiB are in the store {stored_s:.1f} s later", "dim")
        first.daemon.stop(signal.SIGKILL)
    screen.say("it was killed (kill -9), and its memory and disk are gone", "dim")

    screen.title("2. The second host starts with an empty disk, and is asked the same.")
    if pool is None:
        demos = _beside_each_other(screen, url, names)
    else:
        demos = [_ask(screen, url, STORE_S)]
        pool.lenders[0].kill()
        screen.title(
            f"3. One of the {NUM_LENDERS} lenders of memory is killed. A third host is asked the same."
        )
        demos.append(_ask(screen, url, LOST_S))
    num_different = first.totals.num_different + sum(demo.totals.num_different for demo in demos)
    if num_different:
        screen.say(f"{num_different} answers DIFFER from a run without kvtier", "red")
    else:
        screen.say("all answers are those of a run without kvtier, logits bit for bit", "green")
    return 1 if num_different or not demos[0].num_fetched else 0


def _ceph(folder: Path, stack: ExitStack) -> str:
    """Start Ceph's gateway, and return the address of a bucket. Raises RuntimeError."""
    from tests.sources.objects.gateway import gateway, why_not

    if reason := why_not():
        raise RuntimeError(reason)
    running = stack.enter_context(gateway(folder / "ceph"))
    os.environ.update(running.environment())
    running.make_bucket(BUCKET)
    return f"s3://{BUCKET}/kv"


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


def _ask(screen: Screen, url: str, patience_s: float) -> StoreDemo:
    """Ask a new host the first question of each reader; return it, with what happened. It has ended then."""
    with host(screen, url) as demo:
        _ask_all(screen, demo, patience_s)
    return demo


def _beside_each_other(screen: Screen, url: str, names: set[str]) -> list[StoreDemo]:
    """Ask two new hosts the same, and then questions that both compute; return them. `names`: of the bundles
    that the store has."""
    with host(screen, url) as second:
        _ask_all(screen, second)
        screen.title("3. A third host beside the second one is asked the same; then both the next question.")
        with host(screen, url) as third:
            _ask_all(screen, third)
            demos = [second, third]
            new = _compute(demos) - names
            for demo in demos:
                demo.wait_until_stored(new)
            stored, found = (sum(one) for one in zip(*map(_num_exported, demos), strict=True))
            if stored != len(new):
                raise RuntimeError(f"{len(new)} bundles were stored {stored} times")
            screen.say(
                f"both hosts computed the ends of these prompts, {len(new)} bundles: each was stored once, "
                f"and {found} times found to be there",
                "dim",
            )
    return demos


def _ask_all(screen: Screen, demo: StoreDemo, patience_s: float = STORE_S) -> None:
    """Ask a new host the first question of each reader, with patience, and say what it read."""
    demo.patience_s = patience_s
    for reader in demo.readers:
        demo.turn(reader)
    demo.patience_s = 0.0
    _tell(screen, demo)


def _compute(demos: list[StoreDemo]) -> set[str]:
    """Ask hosts the next question of each reader; return the names of the whole bundles of the prompts.
    Each has looked into the store before one of them computes, and so all of them compute."""
    names: set[str] = set()
    for readers in zip(*(demo.readers for demo in demos), strict=True):
        begun = [demo.begin(reader) for demo, reader in zip(demos, readers, strict=True)]
        for demo, turn in zip(demos, begun, strict=True):
            names.update(demo.bundles(turn.reader.tokens))
            demo.finish(turn)
    return names


def _num_exported(demo: StoreDemo) -> tuple[int, int]:
    """Return how many bundles a host stored, and how many it found to be there when it wanted to."""
    exports = demo.daemon.status().source.exports
    return exports["stored"], exports["shared_already"]


def _tell(screen: Screen, demo: StoreDemo) -> None:
    """Say what a host read from the store, and draw its tiers."""
    status = demo.daemon.status()
    screen.tiers(status)
    demo.num_fetched = status.source.num_blocks_fetched
    screen.say(
        f"{demo.num_fetched * demo.store.block_tokens:,} tokens were read from the store, each block once; "
        f"{demo.totals.without_s:.1f} s of prefill became {demo.totals.with_s:.1f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
