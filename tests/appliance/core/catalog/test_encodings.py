"""Fragments that rest encoded in the cold store: their room, and what happens when they do not fit."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.encodings import AS_IT_IS, MAX_ENCODINGS, Encoding, Encodings, NoCompression
from kvtier.appliance.core.instructions import Copy
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import NamespaceIdentity, Tier
from kvtier.tiers.codecs.base import PROFILED_ID
from kvtier.tiers.cold.log import record_bytes

from ..rig import GEOMETRY, Rig, hashes

HALF = Encoding(1, GEOMETRY.fragment_bytes[0] // 2)


class Halved:
    """The first layer group at half its size, the others as they are."""

    def encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        return (HALF,) + (None,) * (identity.geometry.num_groups - 1)

    exact_encodings_of = encodings_of


def compressing_rig() -> Rig:
    rig = Rig(dram_blocks=4, nvme_blocks=4)
    rig.planner.requests.compress(Halved())
    return rig


def nvme_copies(rig: Rig) -> list[Copy]:
    return [copy for copy in rig.started if copy.target is Tier.NVME]


def test_a_record_is_reserved_and_labelled_as_its_codec_says() -> None:
    rig = compressing_rig()
    chain = hashes("a", 2)
    rig.put(chain)
    rig.cool(chain)
    labels = [item.label for copy in nvme_copies(rig) for item in copy.items]
    stored = {label.group: (label.codec_id, label.stored_length) for label in labels}
    assert stored == {0: HALF, 1: (0, 0)}
    raw = GEOMETRY.fragment_bytes[1]
    assert rig.planner.core.transitions.resident_bytes[Tier.NVME] == 2 * (HALF.stored_bytes + raw)
    books = rig.planner.rooms[Tier.NVME].statistics()
    assert books.taken_bytes >= 2 * (record_bytes(HALF.stored_bytes) + record_bytes(raw))
    assert rig.planner.check_integrity() == []


def test_what_comes_up_again_says_how_it_is_stored() -> None:
    rig = compressing_rig()
    chain = hashes("a", 1)
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.planner.requests.compress(NoCompression())  # what is there stays as it is there
    rig.acquire(chain)
    up = [item.label for copy in rig.copies if copy.source is Tier.NVME for item in copy.items]
    assert {label.group: label.codec_id for label in up} == {0: 1, 1: 0}
    rig.settle()
    assert "dram" in rig.where(chain[0])
    assert rig.planner.check_integrity() == []


def test_what_does_not_fit_is_stored_as_it_is() -> None:
    rig = compressing_rig()
    chain = hashes("a", 1)
    rig.put(chain)
    rig.do(ev.DrainStarted(rig.call()))
    (copy,) = nvme_copies(rig)
    outcomes = [
        CopyOutcome(Cause.DOES_NOT_FIT if item.label.codec_id else None, b"\7" * 16) for item in copy.items
    ]
    rig.copies.remove(copy)
    rig.do(ev.CopyFinished(copy.copy, outcomes))
    rig.do(ev.Tick())
    rig.settle()
    assert rig.where(chain[0]) == {"dram", "nvme"}
    assert all(not item.label.codec_id for copy in nvme_copies(rig)[1:] for item in copy.items)
    assert rig.planner.catalog.unfit
    assert rig.planner.check_integrity() == []


def test_what_is_forgotten_leaves_no_note() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=0)
    chain = hashes("a", 2)
    rig.put(chain)
    catalog = rig.planner.catalog
    catalog.unfit.update(catalog.fragments(catalog.find(rig.namespace_id, chain[1])))
    rig.put(hashes("b", 2))
    assert rig.where(chain[1]) == set()
    assert not catalog.unfit


def test_numbers_are_given_once_and_are_bounded() -> None:
    encodings = Encodings()
    assert encodings.number_of(None) == AS_IT_IS
    first = encodings.number_of(Encoding(1, 100))
    assert encodings.number_of(Encoding(1, 100)) == first
    assert (encodings.codec_id(first), encodings.stored_bytes(first, 999)) == (1, 100)
    assert (encodings.codec_id(AS_IT_IS), encodings.stored_bytes(AS_IT_IS, 999)) == (0, 999)
    for length in range(1, MAX_ENCODINGS + 10):
        encodings.number_of(Encoding(2, length))
    assert len(encodings) == MAX_ENCODINGS
    assert encodings.number_of(Encoding(3, 1)) == AS_IT_IS


class Lossy:
    """Lossy, but for what has spent its budget."""

    def encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        return (Encoding(PROFILED_ID, 512),) * identity.geometry.num_groups

    def exact_encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        return (HALF,) * identity.geometry.num_groups


def test_a_record_that_is_condemned_while_it_is_read_has_spent_the_budget_all_the_same() -> None:
    """Two read it at once; the second one succeeds. What it brought was decoded from a lossy record."""
    rig = Rig(dram_blocks=4, nvme_blocks=8)
    rig.planner.requests.compress(Lossy())
    chain = hashes("a", 1)
    rig.put(chain)
    rig.cool(chain)
    call = rig.acquire(chain)
    catalog = rig.planner.catalog
    fragments = catalog.fragments(catalog.find(rig.namespace_id, chain[0]))
    for fragment in fragments:
        rig.planner.residency.condemn(fragment, Tier.NVME, "wrong_checksum")
    rig.settle()
    rig.release(call)
    assert rig.where(chain[0]) == {"dram"}
    rig.started.clear()
    rig.cool(chain)
    codecs = {item.label.codec_id for copy in nvme_copies(rig) for item in copy.items}
    assert codecs == {HALF.codec_id}, "nothing is lost twice"
