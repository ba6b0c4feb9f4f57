"""Expected: acquires that wait for what another runtime computes, and the host that tells of it, badly.

In seeds from FIRST_EXPECTED_SEED on half of the acquires expect blocks. Those of another host are computed
there one after the other while the acquire waits: it tells of them late, of fewer, of more, of none, or is
gone before it has told of all. The shell keeps the promises of AwaitBlocks: there is one end, soon after
`until` at the latest. Some callers name no time, and nothing is known of how long computing takes: then only
the end of what is told ends the wait.

Drawn from a source of randomness of its own.
"""

from random import Random
from typing import TYPE_CHECKING

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import AwaitBlocks, StopAwaiting

from .requests import Chain
from .world import World

if TYPE_CHECKING:
    from .daemon import Daemon
    from .oracle import Contents
    from .source import VirtualSource

FIRST_EXPECTED_SEED = 3_000_000
HOST = "host:1"
NEVER = float("inf")


class ExpectedDraws:
    """What acquires of one seed expect."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rng = Random(f"expected of {world.seed}")
        self.is_on = world.seed >= FIRST_EXPECTED_SEED

    def draw(self, chain: Chain) -> ev.ExpectedPart | None:
        """Draw what an acquire expects; None of those that expect nothing."""
        if not self.is_on or self.rng.random() < 0.5:
            return None
        self._world.counts["acquires_expecting"] += 1
        source = self.rng.choice(("", HOST, HOST))
        until = self._world.now + self.rng.choice((0.001, 0.1, 1.0))
        if source and self.rng.random() < 0.5:
            until = NEVER
        return ev.ExpectedPart(self.rng.randint(1, len(chain.hashes)), until, source)


class OtherPrefill:
    """Another host's runtime, which computes what this daemon's shell awaits."""

    def __init__(self, daemon: "Daemon", source: "VirtualSource", contents: "Contents") -> None:
        self._daemon = daemon
        self._source = source
        self._contents = contents
        self._rng = Random(f"prefill of {daemon.world.seed} from {daemon.world.now}")
        self._stopped: set[int] = set()
        self.accepted: set[tuple[bytes, bytes]] = set()  # blocks that the crowd may find

    def begin(self, work: AwaitBlocks) -> None:
        """Compute some of the blocks, tell of them, and end."""
        world, rng = self._daemon.world, self._rng
        world.note(">Await", work.number, len(work.names))
        at, told, pace_s = 0.0, 0, rng.choice((1e-4, 0.01, 0.3))
        num_computed = rng.choice((0, len(work.names), rng.randint(0, len(work.names))))
        while told < num_computed:
            at += pace_s * rng.random()
            told += rng.randint(1, num_computed - told)
            if world.now + at > work.until:
                break
            says = told if rng.random() < 0.9 else rng.randint(0, len(work.names) + 2)
            world.after(at, self._tell, work, told, says)
        ends_s = at + pace_s * rng.random()
        if rng.random() < 0.3 and work.until < NEVER:  # it stands still
            ends_s = work.until - world.now
        world.after(max(0.0, min(ends_s, work.until - world.now)), self._end, work)

    def stop(self, work: StopAwaiting) -> None:
        """Tell no more; what is on its way already may still come."""
        if self._rng.random() < 0.8:
            self._stopped.add(work.number)

    def _tell(self, work: AwaitBlocks, num_computed: int, says: int) -> None:
        """Put the first blocks where fetches find them, and say so."""
        digest = work.identity.digest
        for name in work.names[:num_computed]:
            if (digest, name) not in self._source.blocks:
                self.accepted.add((digest, name))
                tokens = []
                for group in range(work.identity.geometry.num_groups):
                    tokens.append(self._contents.new((digest, name, group)))
                    self._contents.commit(tokens[-1])
                self._source.blocks[digest, name] = tokens
        self._deliver(ev.BlocksTold(work.number, says))

    def _end(self, work: AwaitBlocks) -> None:
        self._deliver(ev.BlocksTold(work.number, 0, is_over=True))

    def _deliver(self, event: ev.BlocksTold) -> None:
        if self._daemon.is_alive and event.await_number not in self._stopped:
            self._daemon.step(event)
