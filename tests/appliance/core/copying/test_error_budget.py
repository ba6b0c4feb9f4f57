"""An error budget is spent once: through the planner and the real cold store, however often a record is lost,
also over restarts."""

from pathlib import Path

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvtier.appliance.compression.codec_choice import CodecChoice
from kvtier.appliance.config import CompressionSettings
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import Copy, Instruction, Publish, Retract
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, NamespaceIdentity, Tier
from kvtier.tiers.codecs.base import PROFILED_ID, shape_of
from kvtier.tiers.codecs.lossy.profile import Coder, Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import slot_of
from tests.contracts.kv_values import values_like_kv
from tests.tiers.cold.store import in_slot

from ..rig import GEOMETRY, Rig, hashes

MODEL = b"m" * 16
CHAIN = hashes("budget", 1)
RECORD = GEOMETRY.fragment_bytes[0]
FAST = 1e12  # bytes a second: what `auto` would decode at no cost


def profile_of(coder: Coder, bits: int) -> Profile:
    rules = uniform_rules(GEOMETRY.num_layers, 2, 1, coder, bits)
    return Profile(
        MODEL,
        GEOMETRY.num_layers,
        1,
        GEOMETRY.head_dim,
        2,
        GEOMETRY.dtype,
        rules,
    )


class Host(Rig):
    """A rig whose copies move real bytes: slots are a dict, the cold store is a real one."""

    def __init__(self, directory: Path, profile: Profile) -> None:
        self.slots: dict[int, bytes] = {}
        self.labels: dict[int, FragmentLabel] = {}  # of what was published last, by place
        self.staging = b""
        self.store = ColdStore.open(directory, 1 << 20, 4)
        self.store.codecs.adopt({profile.digest: profile})
        super().__init__(dram_blocks=4, nvme_blocks=4)
        settings = CompressionSettings()
        self.planner.requests.compress(
            CodecChoice(settings, {("float16", "planes"): FAST}, 1e9, 1, self.store.codecs.profiled)
        )
        recovered = self.store.recover()
        if recovered.num_records:
            self.planner.adopt(recovered, 0.0)
        call = self.call()
        identity = NamespaceIdentity(MODEL, GEOMETRY, profile_digest=profile.digest)
        self.do(ev.NamespaceRegistered(call, identity))
        self.store.store_namespace(identity)
        self.namespace_id = self.answer(call).namespace_id

    def do(self, event: ev.Event) -> list[Instruction]:
        instructions = super().do(event)
        for run in instructions:
            if isinstance(run, Publish):
                self.labels.update(zip(run.places, run.labels, strict=True))
            elif isinstance(run, Retract):
                for place in run.places:
                    del self.labels[place]
        return instructions

    def finish(self, copy: Copy, cause: Cause | None = None) -> None:
        self.copies.remove(copy)
        outcomes = [self._move(copy.source, copy.target, item) for item in copy.items]
        self.do(ev.CopyFinished(copy.copy, outcomes))

    def _move(self, source: Tier | None, target: Tier, item: CopyItem) -> CopyOutcome:
        label = item.label
        if source is Tier.NVME:
            into = in_slot(bytes(label.raw_length))
            (outcome,) = self.store.read_batch([(item.source, label, into)])
            self.slots[item.target] = bytes(into)
            return outcome
        payload = (
            self.staging[item.source :][: label.raw_length] if source is None else self.slots[item.source]
        )
        if target is Tier.NVME:
            (outcome,) = self.store.write_batch([(item.target, label, in_slot(payload))])
            return outcome
        self.slots[item.target] = payload
        return CopyOutcome(None, xxhash.xxh3_128_digest(payload))

    def fragments(self) -> range:
        catalog = self.planner.catalog
        return catalog.fragments(catalog.find(self.namespace_id, CHAIN[0]))

    def load(self) -> bytes:
        """Bring the block up; return what it holds now."""
        call = self.acquire(CHAIN)
        self.settle()
        self.release(call)
        places = self.planner.catalog.place[Tier.DRAM]
        return b"".join(self.slots[places[fragment]] for fragment in self.fragments())

    def spill(self) -> None:
        """Store the block in the cold store, and leave memory."""
        self.cool(CHAIN)

    def lose_records(self) -> None:
        """What stands in the cold store cannot be read any more, as a failed read finds out."""
        for fragment in self.fragments():
            self.planner.residency.condemn(fragment, Tier.NVME, "lost")
        self.tick()
        assert self.where(CHAIN[0]) == {"dram"}

    def codecs_used(self) -> set[int]:
        """Return the codecs of the block's records."""
        catalog = self.planner.catalog
        return {catalog.encodings.codec_id(catalog.encoding[fragment]) for fragment in self.fragments()}

    def stop(self) -> None:
        """End as a drain does: what was written is sealed."""
        room = self.planner.rooms[Tier.NVME]
        room.close_open_segments()  # type: ignore[attr-defined]
        for number in room.take_segments_to_seal():  # type: ignore[attr-defined]
            assert self.store.seal(number)
        assert self.store.check_integrity() == []
        self.store.close()


def payload_like_kv(seed: int) -> bytes:
    return b"".join(
        values_like_kv(shape_of(GEOMETRY, group), seed + group).tobytes()
        for group in range(GEOMETRY.num_groups)
    )


def worst_error(found: bytes, raw: bytes) -> float:
    ours, theirs = (np.frombuffer(one, np.float16).astype(np.float64) for one in (found, raw))
    difference: NDArray[np.float64] = np.abs(ours - theirs)
    return float(difference.max())


@pytest.mark.parametrize(("coder", "bits"), [("int", 2), ("int", 4), ("int", 8)])
def test_nothing_is_quantised_twice(tmp_path: Path, coder: Coder, bits: int) -> None:
    host = Host(tmp_path, profile_of(coder, bits))
    host.staging = payload_like_kv(bits)
    host.put(CHAIN)
    host.spill()
    assert host.codecs_used() == {PROFILED_ID}
    first = host.load()
    assert first != host.staging
    for _ in range(3):
        host.lose_records()
        host.spill()
        assert PROFILED_ID not in host.codecs_used()
        found = host.load()
        assert worst_error(found, host.staging) == worst_error(first, host.staging)
        assert found == first
    host.stop()


def test_a_restart_forgets_neither_what_was_spent_nor_what_was_not(tmp_path: Path) -> None:
    profile = profile_of("int", 3)
    host = Host(tmp_path, profile)
    host.staging = raw = payload_like_kv(9)
    host.put(CHAIN)
    host.spill()
    first = host.load()
    host.lose_records()
    host.spill()  # exactly, from here on
    for _ in range(2):
        host.stop()
        host = Host(tmp_path, profile)
        assert host.load() == first
        host.lose_records()
        host.spill()
        assert PROFILED_ID not in host.codecs_used()
    host.stop()
    assert first != raw


def test_memory_that_outlives_its_daemon_is_not_quantised_again(tmp_path: Path) -> None:
    """Before: the next daemon took what was decoded for what was put, and stored it lossily once more."""
    profile = profile_of("int", 3)
    former = Host(tmp_path / "former", profile)
    former.staging = payload_like_kv(9)
    former.put(CHAIN)
    former.spill()
    first = former.load()
    former.stop()
    host = Host(tmp_path / "next", profile)  # the records were lost
    assert host.namespace_id == former.namespace_id
    host.slots, found = former.slots, [(slot_of(place), label) for place, label in former.labels.items()]
    assert [label.group for _, label in found] == list(range(GEOMETRY.num_groups))
    room = host.planner.rooms[Tier.DRAM]
    assert isinstance(room, SlotPool)
    room.hold([0])
    host.do(ev.ExtentFound(Tier.DRAM, 0, host.planner.found_memory.takes(found)))
    host.do(ev.FoundVerified(Tier.DRAM, list(former.labels.items()), [True] * len(found)))
    assert host.where(CHAIN[0]) == {"dram"}
    host.spill()
    assert PROFILED_ID not in host.codecs_used()
    assert host.load() == first
    host.stop()


def test_what_is_put_anew_has_a_budget_again(tmp_path: Path) -> None:
    """A block that was lost in every tier and is computed again is stored as its profile says."""
    host = Host(tmp_path, profile_of("int", 4))
    host.staging = payload_like_kv(3)
    host.put(CHAIN)
    host.spill()
    host.load()
    assert host.planner.catalog.spent
    host.lose_records()
    host.do(ev.EvictRequested(host.call(), Tier.DRAM, 0))
    host.settle()
    assert host.where(CHAIN[0]) == set()
    host.put(CHAIN)
    host.spill()
    assert host.codecs_used() == {PROFILED_ID}
    assert not host.planner.catalog.spent
    host.stop()


def test_the_store_itself_refuses_to_lose_more(tmp_path: Path) -> None:
    """Whoever asks for a lossy record of what has spent its budget is told to ask otherwise."""
    profile = profile_of("int", 4)
    host = Host(tmp_path, profile)
    host.staging = payload_like_kv(5)
    host.put(CHAIN)
    label = host.planner.catalog.label_of(host.fragments()[0])
    label.codec_id, label.is_spent = PROFILED_ID, True
    label.stored_length = Profiled(profile).stored_bound(shape_of(GEOMETRY, 0))
    place = host.planner.rooms[Tier.NVME].reserve(0, label.stored_length)
    assert place is not None
    (outcome,) = host.store.write_batch([(place, label, in_slot(host.staging[:RECORD]))])
    assert outcome.cause is Cause.DOES_NOT_FIT
    host.store.close()


def test_the_exact_choice_never_names_a_profile() -> None:
    profile = profile_of("int", 4)
    identity = NamespaceIdentity(MODEL, GEOMETRY, profile_digest=profile.digest)
    choice = CodecChoice(
        CompressionSettings(), {("float16", "planes"): FAST}, profiled={profile.digest: Profiled(profile)}
    )
    lossy, exact = choice.encodings_of(identity), choice.exact_encodings_of(identity)
    assert {one.codec_id for one in lossy if one} == {PROFILED_ID}
    assert {one.codec_id for one in exact if one} == {codec_named("planes").codec_id}
