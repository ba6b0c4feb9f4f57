"""Bytes by urgency against a count by hand, whatever is in the catalog."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.appliance.core.catalog.catalog import NO_ROW, Catalog
from kvtier.appliance.core.catalog.states import State
from kvtier.appliance.core.encodings import Encoding
from kvtier.appliance.observability.census import CLASSES, MAX_SHARE, Census, bytes_by_urgency, only_in_memory
from kvtier.tiers.block import NO_SESSION, Geometry, NamespaceIdentity, Tier, Urgency
from kvtier.tiers.ladder import STANDARD

SHAPES = [
    Geometry(num_layers=5, num_kv_heads=1, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2),
    Geometry(num_layers=1, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="float32"),
]


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    """Return a catalog whose fragments are anywhere, in any state."""
    catalog = Catalog()
    identities = [NamespaceIdentity(bytes([i]) * 16, g) for i, g in enumerate(SHAPES)]
    namespaces = [catalog.add_namespace(one, 0, 7_000_000 - i) for i, one in enumerate(identities)]
    is_encoded = draw(st.booleans())
    numbers = [0, *([catalog.encodings.number_of(Encoding(1, 12_345))] if is_encoded else [])]
    for number in range(draw(st.integers(0, 12))):
        row = catalog.add(draw(st.sampled_from(namespaces)), number.to_bytes(32, "big"), NO_ROW, 0.0)
        catalog.urgency[row] = draw(st.integers(0, NO_SESSION))
        for fragment in catalog.fragments(row):
            for tier in STANDARD.tiers:
                state = catalog.state[tier][fragment] = draw(st.sampled_from(State))
                catalog.num_resident[tier][row] += state == State.RESIDENT
            catalog.encoding[fragment] = draw(st.sampled_from(numbers))
    return catalog


@settings(max_examples=60, deadline=None)
@given(catalogs())
def test_it_counts_what_is_there(catalog: Catalog) -> None:
    for tier in STANDARD.tiers:
        by_hand: Counter[str] = Counter()
        for namespace in catalog.namespaces.values():
            for row in namespace.rows.values():
                for fragment in catalog.fragments(row):
                    if catalog.state[tier][fragment] == State.RESIDENT:
                        by_hand[CLASSES[catalog.urgency[row]]] += catalog.stored_length(fragment, tier)
        assert bytes_by_urgency(catalog, tier) == {name: by_hand[name] for name in CLASSES}


def test_every_urgency_has_its_name_and_blocks_without_a_session_have_another() -> None:
    assert [CLASSES[urgency] for urgency in Urgency] == [urgency.name.lower() for urgency in Urgency]
    assert CLASSES[NO_SESSION:] == ("none",)


@settings(max_examples=60, deadline=None)
@given(catalogs())
def test_it_counts_what_a_death_of_the_process_would_take(catalog: Catalog) -> None:
    blocks = []
    for namespace in catalog.namespaces.values():
        for row in namespace.rows.values():
            hbm, dram, nvme = ([catalog.state[t][f] for f in catalog.fragments(row)] for t in STANDARD.tiers)
            if State.RESIDENT in (*hbm, *dram) and set(nvme) != {State.RESIDENT}:
                blocks.append(namespace.block_bytes)
    assert only_in_memory(catalog) == (len(blocks), sum(blocks))


def test_it_counts_no_more_often_than_it_is_worth() -> None:
    """Counting takes a second of this clock: not again before that is a small share of the time."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    census = Census(Catalog(), [Tier.DRAM], clock)
    first = census.take()
    assert census.take() is first
    now[0] += 0.5 / MAX_SHARE
    assert census.take() is not first
