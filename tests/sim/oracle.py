"""The oracle: what was accepted, and what must be true. It stands outside and shares no code with the core.

`Contents` knows every token there ever was and which key its client wrote it for. `Oracle` looks at the
planner after every step (cheap checks) and now and then at all of it (the audit).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.appliance.core.catalog.rules import ADMINISTRATOR
from kvtier.appliance.core.catalog.states import State
from kvtier.appliance.core.events import Event, PrefetchRequested
from kvtier.appliance.core.instructions import BlockChange, Copy, Instruction, Notify
from kvtier.tiers.block import Tier, Urgency
from kvtier.v1.shm import extent_of

from .ladder import DRAM, MAPPED, NVME
from .world import Violation, World

if TYPE_CHECKING:
    from .daemon import Daemon

#: Reasons for which a block goes whoever is left behind.
CONDEMNED = ("incomplete", "wrong_checksum", "wrong_identity", "no_key", "tenant erased", "put again")
#: Why the cold store gives up what it has of a block although something continues it.
SPARE_HALF = "half of it, and memory has all"
TIER_LOST = "tier lost"  # a GPU, with what only its memory had
#: Reasons that say that a slower tier has all of a block.
CLEAN = ("coldest",)
Key: TypeAlias = tuple[bytes, bytes, int]  # namespace digest, prefix hash, layer group


def checksum_of(token: int) -> bytes:
    """Return the checksum of a token: injective, as xxh3-128 is for all that matters here."""
    return token.to_bytes(16, "big")


class Contents:
    """Every content there ever was. Token 0 is uninitialised memory."""

    def __init__(self) -> None:
        self._keys: list[Key | None] = [None]
        self._committed: set[int] = set()
        #: Of tenants that were erased, from when their key was gone, and from when the planner said so.
        self.doomed: set[int] = set()
        self._buried: set[int] = set()
        self._decoded: dict[int, int] = {}  # token -> what a lossy codec makes of it
        self._lossy: set[int] = set()  # the contents it made

    def new(self, key: Key) -> int:
        """A client wrote something for `key` into its staging extent."""
        self._keys.append(key)
        return len(self._keys) - 1

    def garbage(self) -> int:
        """Something nobody meant: a half-written slot, a rotten sector."""
        self._keys.append(None)
        return len(self._keys) - 1

    def decoded(self, token: int) -> int:
        """Return what comes back of `token` from a lossy record: another content, but the same key's, and as
        good as committed. Nothing may be decoded twice."""
        if token in self._lossy:
            raise Violation("quantised twice", f"token {token} was decoded from a lossy record before")
        if token not in self._decoded:
            self._keys.append(self._keys[token])
            made = self._decoded[token] = len(self._keys) - 1
            if self._keys[made] is not None:
                self._lossy.add(made)
            if token in self._committed:
                self._committed.add(made)
        return self._decoded[token]

    def key_of(self, token: int) -> Key:
        """Return the key a client's token was made for."""
        key = self._keys[token]
        assert key is not None
        return key

    def find_key(self, token: int) -> Key | None:
        """Return the key of a token; None of what no client meant."""
        return self._keys[token]

    def commit(self, token: int) -> None:
        """The client said: store this."""
        self._committed.add(token)
        self.bring_anew(token)

    def bring_anew(self, token: int) -> None:
        """A put takes this out of its client's staging extent: whatever was erased before counts no more."""
        self.doomed.discard(token)
        self._buried.discard(token)

    def bury(self, tokens: set[int]) -> None:
        """Nobody may find these any more, unless they were put again since they were doomed."""
        self._buried |= tokens & self.doomed

    def is_buried(self, token: int) -> bool:
        """Whether nobody may find this any more."""
        return token in self._buried

    def must_be(self, token: int, key: Key, where: str, *, may_be_erased: bool = False) -> None:
        """The one that must never fail: `token` was accepted for `key`. `may_be_erased`: by a read that began
        before its tenant was erased, perhaps in the memory of a daemon that died meanwhile."""
        found = self._keys[token]
        if found != key:
            whose = "garbage" if found is None else "another fragment's content"
            raise Violation("wrong bytes", f"{where}: {whose} (token {token})")
        if token not in self._committed:
            raise Violation("wrong bytes", f"{where}: content that was never committed (token {token})")
        if token in self._buried and not may_be_erased:
            raise Violation("erased", f"{where}: content of a tenant that was erased (token {token})")

    def is_of(self, token: int, key: Key) -> bool:
        """Whether a token was accepted for `key`."""
        return self._keys[token] == key and token in self._committed


class SessionModel:
    """What the oracle knows about one session: the blocks its clients were told they have."""

    __slots__ = ("blocks", "client", "urgency")

    def __init__(self, client: int) -> None:
        self.client = client
        self.urgency = Urgency.QUEUED
        self.blocks: dict[tuple[int, bytes], None] = {}


class Oracle:
    """Watches one life of the daemon."""

    def __init__(self, world: World, daemon: "Daemon") -> None:
        self._world = world
        self._daemon = daemon
        self.sessions: dict[str, SessionModel] = {}
        #: Priorities that somebody ever gave a block of this name.
        self._hints: defaultdict[tuple[int, bytes], set[int]] = defaultdict(set)
        self._num_removed_now: Counter[tuple[int, bytes]] = Counter()  # tiers it left in this step
        self.is_lossy = False  # a fault destroyed something: blocks may vanish
        #: Blocks that were said to be whole in the cold store, in this life of the daemon.
        self._whole_in_nvme: set[tuple[int, bytes]] = set()
        self._num_steps = 0

    def session(self, session_id: str, client: int) -> SessionModel:
        """Return the model of a session, which its use by `client` opens."""
        model = self.sessions.get(session_id)
        if model is None:
            model = self.sessions[session_id] = SessionModel(client)
        model.client = client
        return model

    def clients_gone(self) -> None:
        """Nobody decodes on the sessions of dead clients. Whose a session is, the planner says: even a put
        that stored nothing makes it its client's."""
        planner = self._daemon.planner
        for session_id, model in self.sessions.items():
            session = planner.sessions.get(session_id)
            if session is None or session.client not in planner.leases.clients:
                model.urgency = Urgency.IDLE

    def hinted(self, namespace_id: int, hashes: Sequence[bytes], priorities: Sequence[int]) -> None:
        """Somebody gives these blocks one of these priorities."""
        for prefix_hash in hashes if priorities else ():
            self._hints[namespace_id, prefix_hash].update(priorities)

    # -------------------------------------------------------------------------------- every step

    def before_copies(self, event: Event, instructions: Sequence[Instruction]) -> None:
        """Nothing comes up unasked while somebody waits for the same edge."""
        notices = [one for one in instructions if isinstance(one, Notify) and is_removal(one)]
        self._num_removed_now = Counter(
            (one.namespace_id, name) for one in notices for name in one.prefix_hashes
        )
        if isinstance(event, PrefetchRequested):
            return
        edge = (NVME, DRAM)
        demand = [
            copy
            for copy in self._daemon.copies_in_flight()
            if (copy.source, copy.target) == edge and copy.urgency <= Urgency.QUEUED
        ]
        for instruction in instructions:
            if isinstance(instruction, Copy) and (instruction.source, instruction.target) == edge:
                if instruction.urgency <= Urgency.QUEUED:
                    demand.append(instruction)
                elif demand and self._is_prefetch(instruction):
                    raise Violation(
                        "demand first", f"a prefetch begins while copy {demand[0].copy} is awaited"
                    )

    def _is_prefetch(self, copy: Copy) -> bool:
        """Whether all of a copy is for nobody in particular. (An acquire may be in no hurry, too.)"""
        catalog = self._daemon.planner.catalog
        labels = [item.label for item in copy.items]
        return all(catalog.find(one.namespace_id, one.prefix_hash) in catalog.awaited for one in labels)

    def after_step(self) -> None:
        """Check what is cheap; audit everything now and then."""
        self._num_steps += 1
        daemon = self._daemon
        limit = daemon.config.options.max_waiting_puts
        if len(daemon.planner.waiting) > limit:
            raise Violation("bounded", f"{len(daemon.planner.waiting)} requests wait, limit {limit}")
        if self._num_steps % daemon.config.audit_every == 0:
            self.audit()

    def stored(self, notice: Notify) -> None:
        """Blocks are whole in a tier."""
        if notice.tier is NVME:
            self._whole_in_nvme |= {(notice.namespace_id, name) for name in notice.prefix_hashes}

    def removed(self, notice: Notify) -> None:
        """A block left a tier: nobody may be left behind, no decoding session may miss it (I-17, I-18)."""
        catalog = self._daemon.planner.catalog
        for prefix_hash in notice.prefix_hashes:
            was_whole = notice.tier is NVME and (notice.namespace_id, prefix_hash) in self._whole_in_nvme
            if was_whole:
                self._whole_in_nvme.discard((notice.namespace_id, prefix_hash))
            # A namespace without blocks may have been forgotten in the step that tells of its last one.
            is_known = notice.namespace_id in catalog.namespaces
            row = catalog.find(notice.namespace_id, prefix_hash) if is_known else NO_ROW
            readable = row != NO_ROW and catalog.tier_of(row) is not None
            if not readable:
                if not self.is_lossy and notice.reason != TIER_LOST:
                    self._check_decoding(notice.namespace_id, prefix_hash, notice.reason)
                for model in self.sessions.values():  # put again it is another block
                    model.blocks.pop((notice.namespace_id, prefix_hash), None)
            if notice.reason in CLEAN and not readable:
                self._check_clean(notice.namespace_id, prefix_hash, notice.reason)
            if row == NO_ROW or notice.reason in CONDEMNED:
                continue
            if notice.reason in ("io_error", "short_transfer"):
                continue
            if notice.reason == SPARE_HALF:
                self._check_spare_half(row, was_whole)
                continue
            for child in catalog.children(row):
                if (notice.namespace_id, catalog.prefix_hash[child]) in self._daemon.found_now:
                    continue
                protected = self._protected_tiers(row, notice)
                if any(catalog.num_resident[tier][child] for tier in protected):
                    what = f"left {notice.tier.label} ({notice.reason}) before its child"
                    raise Violation("parent before child", f"{prefix_hash.hex()[:8]} {what}")
                if not readable and catalog.tier_of(child) is not None and not self._is_offline():
                    what = f"is gone ({notice.reason}), its child is not"
                    raise Violation("parent before child", f"{prefix_hash.hex()[:8]} {what}")

    def _check_clean(self, namespace_id: int, prefix_hash: bytes, reason: str) -> None:
        """A block left memory because nothing was lost by it, and can be read no more; unless what was left
        of it went in the same step."""
        is_last = self._num_removed_now[namespace_id, prefix_hash] == 1
        if is_last and not self.is_lossy and not self._is_offline():
            raise Violation("clean", f"{prefix_hash.hex()[:8]} left as {reason!r} and was nowhere else")

    def _check_spare_half(self, row: int, was_whole: bool) -> None:
        """The cold store gave up a block that something continues: it had only a part of it, and memory has
        all of it."""
        catalog = self._daemon.planner.catalog
        in_memory = all(
            any(catalog.state[tier][fragment] == State.RESIDENT for tier in MAPPED.memory_tiers)
            for fragment in catalog.fragments(row)
        )
        if was_whole or not in_memory:
            raise Violation(
                "parent before child", f"row {row} left nvme before its child, and was no spare half"
            )

    def _protected_tiers(self, row: int, notice: Notify) -> list[Tier]:
        """Return where nothing may continue a block that left a tier: there; in memory, too, when it left the
        cold store. What an administrator takes out of that may be continued in memory, if it is there."""
        catalog, left = self._daemon.planner.catalog, notice.tier
        is_asked = notice.reason == ADMINISTRATOR and catalog.tier_of(row) is not None
        return list(MAPPED.tiers) if left is NVME and not is_asked else [left]

    def _is_offline(self) -> bool:
        return bool(self._daemon.planner.core.offline) or self._daemon.was_offline

    def _check_decoding(self, namespace_id: int, prefix_hash: bytes, reason: str) -> None:
        if self._daemon.config.options.max_sessions < self._daemon.config.num_sessions * 2:
            return  # the planner may have had to forget the session
        planner = self._daemon.planner
        for session_id, model in self.sessions.items():
            session = planner.sessions.get(session_id)
            idle_s = planner.core.options.session_idle_s
            if session is None or self._world.now - session.last_active >= idle_s:
                continue  # it was silent for longer than a session may be
            if model.urgency is Urgency.DECODING and (namespace_id, prefix_hash) in model.blocks:
                raise Violation("decoding", f"session {session_id} lost {prefix_hash.hex()[:8]} ({reason})")

    # -------------------------------------------------------------------------------- the audit

    def audit(self) -> None:
        """The planner's own audit, and the sum of holds counted from outside (I-15, I-16)."""
        problems = self._daemon.planner.check_integrity()
        if problems:
            raise Violation("check_integrity", "; ".join(problems[:3]))
        self._check_holds()
        self._check_retention()
        self.check_domains()
        self._daemon.check_late()

    def check_domains(self) -> None:
        """No extent that clients of an isolation domain can map holds a byte of another one's."""
        planner, contents = self._daemon.planner, self._daemon.contents
        domain_of = {one.identity.digest: one.domain for one in planner.catalog.namespaces.values()}
        for memory in self._daemon.memories.values():
            for place, token in memory.tokens():
                domain, key = memory.room.domain_of_extent(extent_of(place)), contents.find_key(token)
                if domain is not None and key is not None and domain_of.get(key[0], domain) != domain:
                    where = f"{memory.tier.label} slot {place:#x} of domain {domain}"
                    raise Violation("domains", f"{where} has bytes of domain {domain_of[key[0]]}")

    def _check_retention(self) -> None:
        """A priority is somebody's word about this very block, and who is awaited in dram is there."""
        catalog = self._daemon.planner.catalog
        for row, (priority, _) in catalog.retained.items():
            name = catalog.prefix_hash[row]
            if not name or priority not in self._hints[catalog.namespace_id[row], name]:
                raise Violation(
                    "retention", f"row {row} ({name.hex()[:8]}) has priority {priority} by nobody"
                )
        for row in catalog.awaited:
            if not catalog.prefix_hash[row] or not catalog.num_placed[DRAM][row]:
                raise Violation("retention", f"row {row} is awaited in dram, and not there")

    def _check_holds(self) -> None:
        planner = self._daemon.planner
        catalog = planner.catalog
        expected: list[Counter[int]] = [Counter() for _ in MAPPED.tiers]
        for client in planner.leases.clients.values():
            for lease in client.leases.values():
                for fragment, tier in lease.held:
                    expected[tier][fragment] += 1
        for copy in self._daemon.copies_in_flight():
            if copy.source is not None:
                for item in copy.items:
                    row = catalog.find(item.label.namespace_id, item.label.prefix_hash)
                    if row == NO_ROW:
                        raise Violation("holds", "a block was forgotten under a copy")
                    expected[copy.source][catalog.first_fragment[row] + item.label.group] += 1
        for tier, fragment in planner.found_memory.held():
            expected[tier][fragment] += 1
        for tier, label in self._daemon.source.held():
            row = catalog.find(label.namespace_id, label.prefix_hash)
            if row == NO_ROW:
                raise Violation("holds", "a block was forgotten under an export")
            expected[tier][catalog.first_fragment[row] + label.group] += 1
        for tier in MAPPED.tiers:
            states, holds = catalog.state[tier], catalog.holds[tier]
            for namespace in catalog.namespaces.values():
                for row in namespace.rows.values():
                    first = catalog.first_fragment[row]
                    for fragment in range(first, first + namespace.num_groups):
                        should = expected[tier][fragment] + (states[fragment] == State.ARRIVING)
                        if holds[fragment] != should:
                            where = f"fragment {fragment} in {tier.label}"
                            raise Violation("holds", f"{where}: {holds[fragment]} holds, {should} holders")

    def check_quiescence(self) -> None:
        """Everybody is gone, every copy has ended: nothing may be left (I-14)."""
        self.audit()
        planner = self._daemon.planner
        catalog, core = planner.catalog, planner.core
        left = {
            "leases": len(planner.leases),
            "copies": len(planner.copies),
            "waiting": len(planner.waiting),
            "listeners": len(planner.copies._listeners),
            "pins": len(planner.pins),
            "reservations": len(planner.writes._jobs) + len(planner.writes._fetching),
            "acquires": len(planner.reads._jobs),
            "fetches": len(planner.fetches) + len(self._daemon.source.batches),
            "exports": len(planner.exports),
            "evictions": len(planner.evicting._jobs),
            "segments to empty": len(planner.reclaim.to_empty),
            "reads of segments": len(planner.copies.num_reads_of_segment),
            "holds": sum(sum(holds) for holds in catalog.holds),
            "keepers": sum(catalog.num_keepers),
            "arriving bytes": sum(core.transitions.arriving_bytes.values()),
            "condemned bytes": sum(core.transitions.condemned_bytes.values()),
            "floors": len(core.pin_floors),
            "cancelled": len(planner.copies._cancelled),
            "background": len(planner.copies._background),
            "urgent bytes": sum(planner.core.urgent_bytes.values()),
            "bytes in flight": sum(planner.core.bytes_in_flight.values()),
        }
        leaks = {name: number for name, number in left.items() if number}
        if leaks:
            raise Violation("quiescence", f"left over: {leaks}")


def is_removal(notice: Notify) -> bool:
    """Whether a notice says that blocks left a tier."""
    return notice.change is BlockChange.REMOVED and notice.tier in MAPPED.tiers
