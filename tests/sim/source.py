"""Source: an object store that several lives of the daemon share, and the shell that asks it, badly.

Seeds from FIRST_SEED on have one, of which what is stored outlives every crash. Its answers are slow, late,
refused, cut short, or of other bytes than were stored; what was stored a moment ago is not found yet, and
what was found is gone. The shell keeps the promises of instructions.py: each Search and Export has one end,
each batch of a Fetch one CopyFinished soon after its deadline at the latest, and no fragment lands that is
not what its writer stored. In these seeds daemons crash more often, and lose more, so that there is
something to fetch.

From FIRST_HOSTS_SEED on other hosts are among what is asked: they have single blocks of what was ever stored,
and say that they hold fewer than they do, more, or what is gone.

Drawn from a source of randomness of its own, so that the other seeds are the same as ever.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import exports
from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.appliance.core.copying import source_index, source_speed
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, FetchBundle, SearchBundles
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Geometry, Tier

from .config import SLOT_BYTES, Config
from .expected import FIRST_EXPECTED_SEED
from .oracle import checksum_of
from .world import Violation, World

if TYPE_CHECKING:
    from .daemon import Daemon

FIRST_SEED, FIRST_HOSTS_SEED = 1_000_000, 2_000_000
NOT_EXPORTED = ("dropped", "too_large", "not_worth", "not_in_memory", "over_budget")
LYING = 0.15  # of the answers of hosts

#: Faults and the highest rate a seed may draw: per request, or per batch of a fetch.
FAULTS = {
    "lost": 0.1,  # no answer before the deadline
    "slow": 0.2,
    "refused": 0.1,
    "truncated": 0.1,  # from some layer group on
    "wrong_bytes": 0.1,
    "swapped": 0.05,  # the object of another name stands there
    "lagging": 0.3,  # what is there is not found
    "gone": 0.1,  # what was found is not there
    "lost_answer": 0.2,  # of an export: it is stored, and we hear that it is not
    "outage": 0.1,  # the shell gives up asking for a while
}


@dataclass(slots=True)
class VirtualBundle:
    """One object."""

    bundle: BundleBlocks
    tokens: list[int]  # group-major


class VirtualSource:
    """What is stored, and how badly it is served."""

    def __init__(self, world: World, config: Config) -> None:
        self.rng = Random(f"source of {world.seed}")
        self.is_on = world.seed >= FIRST_SEED
        self.objects: dict[tuple[bytes, bytes], VirtualBundle] = {}
        self.has_hosts = world.seed >= FIRST_HOSTS_SEED
        self.hosts_rng = Random(f"hosts of {world.seed}")
        self.blocks: dict[tuple[bytes, bytes], list[int]] = {}  # that a host has: tokens by layer group
        self.bundle_blocks = self.rng.choice((1, 2, 2, 3))
        if self.has_hosts:
            self.bundle_blocks = self.hosts_rng.choice((2, 3, 4))
        self.answer_s = self.rng.choice((0.0001, 0.001, 0.01))
        self.rates = {
            name: self.rng.random() ** 2 * top * (self.rng.random() < 0.5) for name, top in FAULTS.items()
        }
        if self.is_on:
            config.weights["crash"] += 6
            config.weights["acquire"] *= 2
            config.num_segments = self.rng.choice((0, 0, config.num_segments))
            config.num_operations *= 2
            config.num_keys = self.rng.choice((2, 4, 8))
            config.dram_extents = self.rng.choice((2, 4, 8))
            config.prefill_speeds = [self.rng.choice((None, PrefillModel(100.0))) for _ in config.geometries]
            config.options = replace(
                config.options,
                share=self.rng.choice(("off", "worth", "eager", "eager")),
                max_blocks_per_request=4096,
                daily_export_bytes=self.rng.choice((None, None, 8 * SLOT_BYTES)),
                max_export_bytes=self.rng.choice((8 * SLOT_BYTES, 1 << 30)),
                max_export_fraction=self.rng.choice((0.3, 1.0)),
                fetch_wait_s=self.rng.choice((0.1, 0.5, 10.0)),
            )
        if world.seed >= FIRST_EXPECTED_SEED and self.hosts_rng.random() < 0.5:
            config.prefill_speeds = [None] * len(config.geometries)
            config.options = replace(config.options, fetch_wait_s=float("inf"))

    def keep(self, bundle: BundleBlocks, tokens: list[int]) -> None:
        """Store a bundle; the other hosts have its blocks, too."""
        digest, size = bundle.identity.digest, len(bundle.names)
        self.objects[digest, bundle.names[-1]] = VirtualBundle(bundle, tokens)
        for number, name in enumerate(bundle.names):
            self.blocks[digest, name] = tokens[number::size]

    def at_hosts(self, search: SearchBundles) -> int:
        """Return how many blocks hosts say they hold, from the first one of the first bundle on."""
        if not self.has_hosts or self.hosts_rng.random() < 0.2:
            return 0
        digest, found = search.identity.digest, 0
        while found < len(search.blocks) and (digest, search.blocks[found]) in self.blocks:
            found += 1
        if self.hosts_rng.random() < LYING:
            found = self.hosts_rng.randint(0, len(search.blocks))
        return search.num_here + found if found else 0

    def stored(self, bundle: BundleBlocks) -> VirtualBundle | None:
        """Return what a fetch of these blocks brings; None when they are not all there."""
        digest = bundle.identity.digest
        if not self.has_hosts:
            return self.objects.get((digest, bundle.names[-1]))
        blocks = [self.blocks.get((digest, name), []) for name in bundle.names]
        tokens = [token for group in zip(*blocks, strict=False) for token in group]
        return VirtualBundle(bundle, tokens) if all(blocks) else None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let bundles have as few blocks as this seed drew, and fetches be worth it or not."""
        saved = vars(source_index)["blocks_per_bundle"], vars(source_speed)["DEFAULT_BYTES_PER_S"]
        bundle_blocks = self.bundle_blocks

        def blocks_per_bundle(geometry: Geometry) -> int:
            return bundle_blocks

        vars(source_index)["blocks_per_bundle"] = blocks_per_bundle
        vars(source_speed)["DEFAULT_BYTES_PER_S"] = self.rng.choice((200e6, 1e12))
        try:
            yield
        finally:
            vars(source_index)["blocks_per_bundle"], vars(source_speed)["DEFAULT_BYTES_PER_S"] = saved


class SourceShell:
    """Asks the source for one life of the daemon."""

    def __init__(self, daemon: "Daemon", source: VirtualSource) -> None:
        self._daemon = daemon
        self._world = daemon.world
        self._source = source
        #: Places that exports read: (tier, place, label).
        self.reading: dict[int, Sequence[tuple[Tier, int, FragmentLabel]]] = {}
        self.batches: dict[int, Sequence[CopyItem]] = {}  # of fetches, by copy
        self.failures: Counter[tuple[int, int]] = Counter()  # exports in a row, by namespace and last block
        if source.is_on:
            self._world.after(self._delay_s(), self._change, True)

    # ------------------------------------------------------------------------------- instructions

    def search(self, instruction: SearchBundles) -> None:
        """Answer later how many of the bundles are there, galloping as the real one does."""
        self._world.note(">Search", instruction.search, len(instruction.names))
        digest = instruction.identity.digest
        found, possible, step = 0, len(instruction.names), 1
        while found < len(instruction.names):
            asked = min(step, len(instruction.names))
            if (digest, instruction.names[asked - 1]) not in self._source.objects or self._fault("lagging"):
                possible = asked - 1
                break
            found, step = asked, 2 * step
        if self._fault("refused"):
            found, possible = 0, -1
        event = ev.SourceSearched(instruction.search, found, possible)
        if num_blocks := self._source.at_hosts(instruction):
            num_found = min(num_blocks // self._source.bundle_blocks, len(instruction.names))
            event = ev.SourceSearched(
                instruction.search, num_found, -1, is_stored=False, num_blocks=num_blocks
            )
            self._world.counts["searches_at_hosts"] += 1
        self._world.after(self._delay_s() + 20 * self._fault("lost"), self._step, event)

    def fetch(self, fetch: FetchBundle) -> None:
        """Let each batch land at its own time, until the deadline."""
        self._world.note(">Fetch", [copy for copy, _ in fetch.batches], fetch.bundle.position)
        self.batches.update(fetch.batches)
        read = [(item.label.group, item.source) for _, items in fetch.batches for item in items]
        if read != sorted(read):
            raise Violation("fetches", f"of a bundle that is read from its start to its end: {read}")
        stored = self._source.stored(fetch.bundle)
        self._world.counts["tails_fetched"] += len(fetch.bundle.names) < self._source.bundle_blocks
        if self._fault("gone"):
            stored = None
        if stored is not None and self._fault("swapped") and self._source.objects:
            stored = self._source.rng.choice(list(self._source.objects.values()))
        cause: Cause | None = None
        if stored is None:
            cause = Cause.SOURCE_GONE
        elif stored.bundle != fetch.bundle:  # what BundleHead.require compares
            cause = Cause.WRONG_IDENTITY
        elif self._fault("refused"):
            cause = Cause.IO_ERROR
        at = self._delay_s()
        for copy, items in fetch.batches:
            at += self._delay_s()
            if cause is None and self._fault("truncated"):
                cause = Cause.SHORT_TRANSFER
            wrong = cause or (Cause.WRONG_CHECKSUM if self._fault("wrong_bytes") else None)
            begin_s = at * self._source.rng.random()
            ends_s = at + (1000 if self._fault("lost") else 0)
            if self._world.now + ends_s > fetch.deadline_at:
                ends_s = max(0.0, fetch.deadline_at - self._world.now)
                begin_s, wrong = min(begin_s, ends_s), wrong or Cause.CANCELLED
            assert stored is not None or wrong is not None
            tokens = [] if stored is None or wrong else self._tokens(stored, items)
            self._world.after(begin_s, self._land, copy, fetch.target, items, tokens, ends_s - begin_s, wrong)

    def _tokens(self, stored: VirtualBundle, items: Sequence[CopyItem]) -> list[int]:
        size = len(stored.bundle.names)
        return [stored.tokens[item.label.group * size + item.source] for item in items]

    def _land(
        self,
        copy: int,
        target: Tier,
        items: Sequence[CopyItem],
        tokens: Sequence[int],
        rest_s: float,
        cause: Cause | None,
    ) -> None:
        """Bytes begin to arrive in the places."""
        if not self._daemon.is_alive:
            return
        memory = self._daemon.memories[target]
        for item in items:
            memory.begin_write(item.target)

        def end() -> None:
            if not self._daemon.is_alive:
                return
            del self.batches[copy]
            for number, item in enumerate(items):
                garbage = self._daemon.contents.garbage()
                memory.end_write(item.target, garbage if cause else tokens[number])
            if cause is None:
                self._world.counts["fragments_fetched"] += len(items)
            outcomes = [CopyOutcome(cause, b"" if cause else checksum_of(token)) for token in tokens]
            self._daemon.step(ev.CopyFinished(copy, outcomes or [CopyOutcome(cause)] * len(items)))

        self._world.after(rest_s, end)

    def export(self, export: ExportBundle) -> None:
        """Read the places to the end, then store what stood there."""
        daemon, world = self._daemon, self._world
        world.note(">Export", export.export, export.bundle.position, len(export.fragments))
        for tier, place, _ in export.fragments:
            daemon.memories[tier].slot(place).num_readers += 1
        self.reading[export.export] = export.fragments
        world.after(self._delay_s() + self._delay_s(), self._exported, export)

    def _exported(self, export: ExportBundle) -> None:
        daemon = self._daemon
        if not daemon.is_alive:
            return
        del self.reading[export.export]
        tokens = []
        for tier, place, label in export.fragments:
            memory = daemon.memories[tier]
            slot = memory.slot(place)
            slot.num_readers -= 1
            tokens.append(slot.token if memory.matches(place, label) else 0)
            if not tokens[-1] and not memory.is_lost and not daemon.oracle.is_lossy:
                raise Violation("exports", f"{tier.label} slot {place:#x} is not what is exported")
            if tokens[-1]:
                key = (label.namespace_digest, label.prefix_hash, label.group)
                daemon.contents.must_be(tokens[-1], key, "exported")
        key_of_bundle = (export.bundle.identity.digest, export.bundle.names[-1])
        is_new = key_of_bundle not in self._source.objects
        is_stored = all(tokens) and not self._fault("refused")
        if is_stored and is_new:  # created once, never overwritten
            self._source.keep(export.bundle, tokens)
            self._world.counts["bundles_exported"] += 1
        if self._fault("lost_answer"):
            is_stored = False
        num_bytes = sum(label.raw_length for _, _, label in export.fragments) * is_new
        namespace_id = export.fragments[0][2].namespace_id
        if (row := daemon.planner.catalog.find(namespace_id, export.bundle.names[-1])) != NO_ROW:
            last = namespace_id, daemon.planner.catalog.handle(row)
            self.failures[last] = 0 if is_stored else self.failures[last] + 1
        read_s = self._delay_s() if export.is_trial and is_stored and export.export % 2 else 0.0
        daemon.step(ev.ExportFinished(export.export, is_stored, num_bytes * is_stored, read_s))
        if self._fault("outage"):
            self._change(False)
            self._world.after(10 * self._delay_s(), self._change, True)

    def held(self) -> list[tuple[Tier, FragmentLabel]]:
        """Return what the exports under way hold."""
        return [(tier, label) for fragments in self.reading.values() for tier, _, label in fragments]

    def check_quiet(self) -> None:
        """What failed to be exported was tried again until it was stored, or there was a reason not to."""
        planner = self._daemon.planner
        counters = planner.story.counters
        if not planner.exports.is_open or any(counters.get(f"exports_{reason}") for reason in NOT_EXPORTED):
            return
        for (namespace_id, last), num_failures in self.failures.items():
            row = planner.catalog.row_of(last)
            if row == NO_ROW or not 0 < num_failures <= exports.MAX_RETRIES:
                continue
            if not planner.source_index.is_stored(namespace_id, planner.catalog.prefix_hash[row]):
                raise Violation("exports", f"failed {num_failures} times and was not tried again")

    # ------------------------------------------------------------------------------------ private

    def _change(self, is_open: bool) -> None:
        self._step(ev.SourceChanged(is_open, has_hosts=self._source.has_hosts))

    def _step(self, event: ev.Event) -> None:
        if self._daemon.is_alive:
            self._daemon.step(event)

    def _delay_s(self) -> float:
        slow = 50 if self._fault("slow") else 1
        return self._source.rng.random() ** 2 * 2 * self._source.answer_s * slow

    def _fault(self, name: str) -> bool:
        rate = self._source.rates[name]
        if rate and self._source.rng.random() < rate:
            self._world.counts[f"source_{name}"] += 1
            return True
        return False
