"""`make demo`: a real transformer with its past keys and values in kvtier, and a daemon that is killed twice.

Three readers talk, in turns, about one long text they share. Every turn is answered twice: without kvtier,
prefilling all of the prompt, and with it; both answers must be the same, bit for bit. Exit code 1 when any is
not, or when nothing is reused after a restart.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtier.clients import Client, KvtierError, Session, Tier

from .daemon import ExampleDaemon
from .screen import MIB, Screen
from .texts import READERS, SYSTEM_TEXT, system_tokens, turn_tokens

if TYPE_CHECKING:
    from kvtier.clients.transformers import TieredCache

    from .model import Generation

# Before torch is imported. Its threads otherwise spin while they wait for each other, and on a machine with
# two processors and anything else to do that makes them twenty times slower. Nothing is fetched from any hub.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

NUM_ANSWER_TOKENS = 16
LAYERS_PER_GROUP = 4
PIN_TTL_S = 3600.0
# Small on purpose: three conversations do not fit in dram, so that blocks spill to nvme.
SETTINGS = [
    "tiers.hbm.capacity=64MiB",
    "tiers.dram.capacity=96MiB",
    "tiers.dram.extent=16MiB",
    "tiers.nvme.capacity=512MiB",
    "tiers.nvme.segment=16MiB",
    "limits.max_pinned=80%",  # of a tier, by one client: here one client is the whole runtime
]


@dataclass(slots=True)
class DemoReader:
    """One conversation, and its session in the daemon."""

    name: str
    session: Session
    tokens: list[int] = field(default_factory=system_tokens)
    num_turns: int = 0


class BegunTurn(NamedTuple):
    """A question that was answered without kvtier, and what was loaded to answer it once more."""

    reader: DemoReader
    without_s: float
    expected: "Generation"
    load_s: float
    cache: "TieredCache"


@dataclass(slots=True)
class Totals:
    """What happened so far."""

    num_turns: int = 0
    num_different: int = 0
    without_s: float = 0.0
    with_s: float = 0.0
    reused_tokens: int = 0
    refused_blocks: int = 0


class Demo:
    """The story, act by act."""

    patience_s = 0.0  # for which `load` asks for the whole of a prompt

    def __init__(self, screen: Screen, daemon: ExampleDaemon, client: Client, num_threads: int) -> None:
        # torch and transformers take seconds to import, and something should be on the screen before that
        from kvtier.clients.transformers import PrefixStore

        from .model import STEP_TOKENS, Model

        self.screen, self.daemon, self.client = screen, daemon, client
        self.model = Model(num_threads)
        # Resumed where a prefill step ends, so that every number comes from the same operation (model.py).
        self.store = PrefixStore(
            self.model.llama, client, align_tokens=STEP_TOKENS, layers_per_group=LAYERS_PER_GROUP
        )
        self.readers = [DemoReader(name, client.session(name)) for name in READERS]
        self.totals = Totals()
        self.pinned_blocks = 0

    def turn(self, reader: DemoReader) -> int:
        """Answer one question without and with kvtier, print the row; return how many tokens were reused."""
        return self.finish(self.begin(reader))

    def begin(self, reader: DemoReader) -> BegunTurn:
        """Answer one question without kvtier, and load what is stored of its prompt."""
        reader.tokens += turn_tokens(READERS[reader.name][reader.num_turns])
        reader.num_turns += 1
        with self.screen.busy(f"{reader.name}, turn {reader.num_turns}: without kvtier"):
            without_s, expected = self.answer_without(reader.tokens)
        with self.screen.busy(f"{reader.name}, turn {reader.num_turns}: loading"):
            return BegunTurn(reader, without_s, expected, *self.load(reader.tokens, reader.name))

    def finish(self, begun: BegunTurn) -> int:
        """Answer with what was loaded, store the rest, print the row; return how many tokens were reused."""
        model, reader, cache = self.model, begun.reader, begun.cache
        tokens = reader.tokens
        with self.screen.busy(f"{reader.name}, turn {reader.num_turns}: with kvtier"):
            began_at = time.perf_counter()
            logits = model.prefill(tokens, cache)
            with_s = begun.load_s + time.perf_counter() - began_at
            answer = model.decode(logits, cache, NUM_ANSWER_TOKENS)
            # Not the answer: the next turn sends it as part of its prompt, and prefills it in whole steps.
            report = cache.save(num_tokens=len(self.store.hashes(tokens)) * self.store.block_tokens)

        identical = answer.equals(begun.expected)
        row = reader.name, reader.num_turns, len(tokens), cache.reuse, begun.without_s, with_s, identical
        self.screen.row(*row)
        reader.tokens = tokens + answer.tokens
        totals = self.totals
        totals.num_turns += 1
        totals.num_different += not identical
        totals.without_s += begun.without_s
        totals.with_s += with_s
        totals.reused_tokens += cache.reuse.num_tokens
        totals.refused_blocks += report.num_refused
        return cache.reuse.num_tokens

    def load(self, tokens: list[int], session: str) -> tuple[float, "TieredCache"]:
        """Load the longest stored prefix of a prompt; return the seconds it took, and the cache.
        Repeated for `patience_s` at most, until all `loadable_tokens` are there; only the last one counts."""
        ends_at = time.monotonic() + self.patience_s
        while True:
            began_at = time.perf_counter()
            cache = self.store.load(tokens, session=session)
            load_s = time.perf_counter() - began_at
            if cache.reuse.num_tokens >= self.loadable_tokens(tokens) or time.monotonic() >= ends_at:
                return load_s, cache
            time.sleep(0.05)

    def loadable_tokens(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt may be had from elsewhere: those of its whole blocks."""
        return len(self.store.hashes(tokens)) * self.store.block_tokens

    def answer_without(self, tokens: list[int]) -> tuple[float, "Generation"]:
        """Compute an answer without kvtier; return the seconds to the first token, and the answer.

        Measured once more when the process hardly ran meanwhile (a suspended laptop, a paused virtual
        machine): it only computes here, and the gain would be a fairy tale.
        """
        for _ in range(2):
            cache = self.model.new_cache()
            began_at, cpu_began_at = time.perf_counter(), time.process_time()
            logits = self.model.prefill(tokens, cache)
            without_s, cpu_s = time.perf_counter() - began_at, time.process_time() - cpu_began_at
            if without_s < 4 * cpu_s:
                break
        return without_s, self.model.decode(logits, cache, NUM_ANSWER_TOKENS)

    def talk(self, readers: list[DemoReader]) -> int:
        """Run one question of each reader in turn; return how many tokens were reused.

        After the first answer the text that all share is pinned in the hot tier; a pin lasts as long as
        the daemon.
        """
        reused_tokens = 0
        for reader in readers:
            reused_tokens += self.turn(reader)
            if not self.pinned_blocks:
                self.pinned_blocks = self.store.pin(system_tokens(), Tier.HBM, PIN_TTL_S)
        return reused_tokens

    def restart(self, how: signal.Signals) -> None:
        """Stop the daemon and start it on the same folder."""
        stop_s = self.daemon.stop(how)
        start_s = self.daemon.start()
        self.pinned_blocks = 0
        self.screen.say(f"down after {stop_s:.1f} s, serving again after {start_s:.1f} s", "dim")


def perform(play: Callable[[Screen], int], picture: Path | None = None, title: str = "") -> int:
    """Run a demonstration; return its exit code. `picture`: where what it printed is drawn, under `title`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that leaving is in order then, too
    screen = Screen(is_recorded=picture is not None)
    try:
        return play(screen)
    except KeyboardInterrupt:
        screen.say("\nstopped; no daemon is left, and their folders are removed")
        return 130
    except (RuntimeError, KvtierError) as problem:
        screen.say(f"\nthe demo failed: {problem}", "red")
        return 1
    finally:
        if picture is not None:
            screen.save(picture, title)


def main() -> int:
    """Run the demo; return its exit code."""

    def play_with_daemon(screen: Screen) -> int:
        with ExampleDaemon(SETTINGS) as daemon, Client(daemon.target, name="demo") as client:
            return play(screen, daemon, client)

    return perform(play_with_daemon)


def play(screen: Screen, daemon: ExampleDaemon, client: Client) -> int:
    """Run the demonstration; return the exit code."""
    began_at = time.perf_counter()
    num_threads = min(2, os.cpu_count() or 1)
    screen.say("kvtier demo: the past of a language model, kept in tiers", "bold")
    with screen.busy("starting the daemon, importing torch, building the model"):
        daemon.start()
        demo = Demo(screen, daemon, client, num_threads)
        demo.model.prefill(system_tokens(), demo.model.new_cache())  # the first run is always slower
    introduce(screen, demo, time.perf_counter() - began_at)

    screen.title("1. Three readers, three rounds.")
    screen.say(
        "Seconds to the first token without kvtier, and with it, of which loading took so long:", "dim"
    )
    screen.header()
    for _ in range(3):
        demo.talk(demo.readers)
    screen.say(
        f"The {demo.pinned_blocks} blocks that all share are pinned in hbm; the rest makes way:", "dim"
    )
    screen.tiers(daemon.status())

    screen.title("2. The daemon is told to stop (SIGTERM) and started again: reuse goes on from disk.")
    demo.restart(signal.SIGTERM)
    screen.header()
    anna, boris, clara = demo.readers
    after_stop = demo.talk([anna])
    num_archived = anna.session.end(archive=True)
    screen.say(f"anna leaves: her session ends, {num_archived} blocks that only memory had go to nvme", "dim")
    after_stop += demo.talk([boris])

    screen.title("3. The daemon is killed (kill -9) and started again: what is on disk is there.")
    demo.restart(signal.SIGKILL)
    screen.header()
    after_kill = demo.talk([anna, clara])

    screen.title("The tiers at the end")
    screen.tiers(daemon.status())
    return summary(screen, demo, after_stop, after_kill, time.perf_counter() - began_at)


def introduce(screen: Screen, demo: Demo, ready_s: float) -> None:
    """Print the setup of the demonstration."""
    layers, store = demo.model.config.num_hidden_layers, demo.store
    screen.say(
        f"model    Llama, {demo.model.num_parameters / 1e6:.0f} M parameters from a seed, untrained: "
        "its words are noise, its work is real\n"
        f"cache    {layers} layers in groups of {LAYERS_PER_GROUP}, float32; a block is "
        f"{store.block_tokens} tokens, {store.block_bytes / 1024:.0f} KiB\n"
        f"prompts  {len(SYSTEM_TEXT):,} bytes that all share, then each reader's own; one token a byte\n"
        f"daemon   hbm 64 MiB (host memory), dram 96 MiB, nvme 512 MiB in {demo.daemon.folder}\n"
        f"ready    after {ready_s:.0f} s"
    )


def summary(screen: Screen, demo: Demo, after_stop: int, after_kill: int, took_s: float) -> int:
    """Print what was gained and what to try; return the exit code."""
    totals, store = demo.totals, demo.store
    chains = [store.hashes(reader.tokens) for reader in demo.readers]
    named, distinct = sum(map(len, chains)), len({name for chain in chains for name in chain})
    screen.title("What it was good for")
    screen.say(
        f"{totals.reused_tokens:,} tokens were not computed again; {totals.without_s:.1f} s of prefill "
        f"became {totals.with_s:.1f} s: {totals.without_s - totals.with_s:.1f} s saved\n"
        f"{named} blocks of three conversations are {distinct} different ones: "
        f"{(named - distinct) * store.block_bytes / MIB:.0f} MiB deduplicated\n"
        f"{after_stop:,} tokens came back after the restart, {after_kill:,} after kill -9; "
        f"the demo took {took_s:.0f} s"
    )
    if totals.refused_blocks:
        screen.say(f"{totals.refused_blocks} blocks found no room and were not kept", "yellow")
    if totals.num_different:
        screen.say(
            f"{totals.num_different} of {totals.num_turns} answers DIFFER from a run without kvtier", "red"
        )
    else:
        screen.say(
            f"all {totals.num_turns} answers are those of a run without kvtier, logits bit for bit", "green"
        )
    if not (after_stop and after_kill):
        screen.say("nothing was reused after a restart; that is wrong", "red")
    screen.say(
        "\nTry next\n"
        "  export KVTIER_TARGET=unix:///tmp/kvtier.sock\n"
        "  .venv/bin/kvtier serve --listen $KVTIER_TARGET &    a daemon with default settings\n"
        "  .venv/bin/python -m examples.quickstart             20 lines: put and get\n"
        "  .venv/bin/kvtier status                             this picture, of your daemon\n"
        "  .venv/bin/kvtier doctor                             what your machine could do better\n"
        "  less docs/integrations/transformers.md              the same in two lines of your generate loop"
    )
    return 1 if totals.num_different or not (after_stop and after_kill) else 0


if __name__ == "__main__":
    raise SystemExit(main())
