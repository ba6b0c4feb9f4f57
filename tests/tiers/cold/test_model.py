"""A model of the cold store: what may be lost, and that nothing else is, over random histories.

The model is a dictionary of what was accepted. A crash may take what the durability mode does not promise,
a flipped bit what it hits; whatever is served must be what was accepted.
"""

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.tiers.base import Cause
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentState
from kvtier.tiers.cold.opening import Durability
from kvtier.tiers.cold.segment_files import segment_path
from tests.tiers.cold.store import NUM_SEGMENTS, Cold, VolatileIo, adopt, flip, labels_of

SEGMENT_BYTES = 128 << 10


class ColdModel(RuleBasedStateMachine):
    @initialize(durability=st.sampled_from(["none", "segment", "record"]))
    def begin(self, durability: Durability) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
        self.durability = durability
        self.number = 0
        self.sealed: set[int] = set()  # segments
        self.damaged: set[int] = set()  # places that may be lost
        self.open()
        self.accepted = self.cold.accepted

    def open(self) -> None:
        self.io = VolatileIo()
        store = ColdStore.open(self.directory, SEGMENT_BYTES, NUM_SEGMENTS, self.durability, io=self.io)
        self.cold: Cold = adopt(store)

    @rule(lengths=st.lists(st.sampled_from([1, 4096, 5000, 16_384, 30_000]), min_size=1, max_size=4))
    def append(self, lengths: list[int]) -> None:
        for length in lengths:
            if self.cold.room.statistics().free_bytes < 3 * SEGMENT_BYTES // 2:
                return
            self.number += 1
            assert self.cold.put([self.number], length)[0].cause is None
        self.seal_full()

    @rule()
    def seal(self) -> None:
        self.cold.room.close_open_segments()
        self.seal_full()

    def seal_full(self) -> None:
        for number in self.cold.room.take_segments_to_seal():
            assert self.cold.store.seal(number)
            self.sealed.add(number)

    @precondition(lambda self: self.cold.room.sealed_segments())
    @rule()
    def free_the_oldest(self) -> None:
        number = self.cold.room.sealed_segments()[0]
        self.cold.free(number)
        self.sealed.discard(number)

    @rule()
    def reopen(self) -> None:
        self.cold.store.close()
        self.restart(promised=set(self.accepted))

    @rule(seed=st.integers(0, 1000), kept=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def crash(self, seed: int, kept: float) -> None:
        self.io.cut_power(random.Random(seed), kept)
        self.cold.store.close()  # only gives back files and lock: nothing is written
        promised = {
            "none": set(),
            "segment": {place for place in self.accepted if place >> 32 in self.sealed},
            "record": set(self.accepted),
        }[self.durability]
        # Without flushes even what a former life of the daemon wrote may be torn.
        if self.durability == "none" and kept < 1.0:
            self.damaged |= set(self.accepted)
        self.restart(promised)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def flip_a_byte(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.accepted)))
        length = self.accepted[place][0].raw_length
        offset = (place & 0xFFFF_FFFF) * 4096 + data.draw(st.integers(0, 255) | st.just(4096 + length - 1))
        flip(segment_path(self.directory, place >> 32), offset)
        self.damaged.add(place)

    def restart(self, promised: set[int]) -> None:
        self.open()
        found = labels_of(self.cold.recovered)
        assert found.keys() <= self.accepted.keys(), "recovered ⊆ accepted"
        for place, label in found.items():
            assert label == self.accepted[place][0]
        assert promised - self.damaged <= found.keys()
        self.accepted = self.cold.accepted = {place: self.accepted[place] for place in found}
        self.damaged &= self.accepted.keys()
        self.sealed = {segment.number for segment in self.cold.recovered.segments}

    @invariant()
    def the_books_are_in_order(self) -> None:
        assert self.cold.store.check_integrity() == []
        assert self.cold.room.check_integrity() == []
        for number, segment in enumerate(self.cold.room.segments):
            assert (segment.state is SegmentState.SEALED) == (number in self.sealed)

    @invariant()
    def nothing_wrong_is_served(self) -> None:
        for place, (label, payload) in self.accepted.items():
            found = self.cold.get(place, label)
            if isinstance(found, Cause):
                assert place in self.damaged
            else:
                assert found == payload

    def teardown(self) -> None:
        if hasattr(self, "cold"):
            self.cold.store.close()
            shutil.rmtree(self.directory)


TestColdModel = ColdModel.TestCase
TestColdModel.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
