"""Names, epochs, rules, and finding by name: pure functions."""

import json
import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from kvtier.sources.objects.finding import ChainExtent, MissingNames, gallop
from kvtier.sources.objects.keys import (
    NUM_ALIVE,
    BundleKey,
    Epochs,
    bundle_key,
    parse_bundle_key,
    tenant_folder,
)
from kvtier.sources.objects.lifecycle import judge_rule, rule_days, rules

DAY_S = 86_400
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()

# ------------------------------------------------------------------------------------ keys, epochs


def test_a_key_says_everything_and_reads_back() -> None:
    key = bundle_key("20261123", "tenant:acme", b"n" * 32, b"x" * 32)
    assert str(key) == f"v1/b/20261123/{tenant_folder('tenant:acme')}/{'6e' * 32}/{'78' * 32}"
    assert parse_bundle_key(str(key)) == key


def test_tenants_have_folders_that_say_nothing_and_differ() -> None:
    folders = {tenant_folder(name) for name in ("", "tenant:a", "tenant:a/b", "tenant:ü", "group:a")}
    assert len(folders) == 5
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in folders)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("epoch", "20261332"),
        ("epoch", "2026-11-23"),
        ("tenant", "acme"),
        ("namespace", "6E" * 32),
        ("name", "78" * 31),
        ("name", "../" + "78" * 31),
    ],
)
def test_other_keys_are_not_taken_for_bundles(part: str, value: str) -> None:
    key = bundle_key("20261123", "t", b"n" * 32, b"x" * 32)
    assert parse_bundle_key(str(key._replace(**{part: value}))) is None
    assert parse_bundle_key(f"{key}.tmp") is None
    assert parse_bundle_key(f"x/{key}") is None


@pytest.mark.parametrize("num_days", [1, 3, 7, 365])
def test_an_epoch_is_read_until_three_have_begun(num_days: int) -> None:
    epochs = Epochs(num_days)
    stored = epochs.present(NOON)
    seen_days = [day for day in range(5 * num_days) if stored in epochs.alive(NOON + day * DAY_S)]
    dead_days = [day for day in range(5 * num_days) if epochs.is_dead(stored, NOON + day * DAY_S)]
    assert sorted(seen_days + dead_days) == list(range(5 * num_days))
    assert (NUM_ALIVE - 1) * num_days < len(seen_days) <= NUM_ALIVE * num_days == rule_days(num_days)
    assert all(len(epochs.alive(NOON + day * DAY_S)) == NUM_ALIVE for day in seen_days)


def test_the_first_day_names_the_epoch() -> None:
    assert Epochs(1).alive(NOON) == ["20261123", "20261122", "20261121"]
    midnight = datetime(2026, 11, 23, tzinfo=UTC).timestamp()
    assert Epochs(1).present(midnight) == "20261123"
    assert Epochs(1).present(midnight - 0.001) == "20261122"
    assert not Epochs(1).is_dead("notes", NOON)
    endless = Epochs(1, is_endless=True)
    assert endless.alive(NOON) == [endless.present(midnight)] == ["19700101"]
    assert not endless.is_dead("19700101", NOON)
    for days in (0, 366, -1):
        with pytest.raises(ValueError, match="between 1 and 365"):
            Epochs(days)


def test_a_bundle_has_the_same_name_in_each_epoch() -> None:
    key = BundleKey("20261123", "t" * 32, "n" * 64, "x" * 64)
    assert key.in_epoch("20261122")[1:] == key[1:]


# ----------------------------------------------------------------------------------------- finding


def walk(num_bundles: int, there: set[int]) -> tuple[ChainExtent, list[int]]:
    """Gallop through a chain; return the extent and what was asked for."""
    asked: list[int] = []
    steps = gallop(num_bundles)
    try:
        index = next(steps)
        while True:
            asked.append(index)
            index = steps.send(index in there)
    except StopIteration as end:
        return end.value, asked


def test_a_chain_of_any_length_is_found_in_few_probes() -> None:
    for num_bundles in range(70):
        for num_there in range(num_bundles + 1):
            extent, asked = walk(num_bundles, set(range(num_there)))
            assert extent.num_found <= num_there <= extent.num_possible <= num_bundles
            assert extent.num_possible <= max(2 * extent.num_found, 0) or extent.num_found == num_there
            assert extent.num_probes == len(asked) == len(set(asked))
            assert len(asked) <= (max(num_bundles - 1, 0)).bit_length() + 1
            assert all(0 <= index < num_bundles for index in asked)
    assert walk(8, set(range(8))) == (ChainExtent(8, 8, 4), [0, 1, 3, 7])
    assert walk(8, set()) == (ChainExtent(0, 0, 1), [0])


def test_any_answers_end_the_walk() -> None:
    chosen = random.Random(7)
    for _ in range(500):
        num_bundles = chosen.randrange(1, 200)
        there = {n for n in range(num_bundles) if chosen.random() < 0.7}
        extent, asked = walk(num_bundles, there)
        assert extent.num_found == 0 or extent.num_found - 1 in there
        assert extent.num_possible == num_bundles or extent.num_possible not in there
        assert len(asked) <= 9


def test_what_is_missing_is_remembered_for_a_while_and_within_bounds() -> None:
    missing = MissingNames(remembered_s=60.0, capacity=3)
    missing.add("a", 100.0)
    assert missing.has("a", 159.9)
    assert not missing.has("a", 160.0)
    assert not missing.has("b", 100.0)
    for second, name in enumerate("abcd"):
        missing.add(name, 101.0 + second)
    assert [missing.has(name, 105.0) for name in "abcd"] == [False, True, True, True]
    assert len(missing) == 3
    missing.add("e", 1000.0)
    assert len(missing) == 1, "what is over is not kept"


# ------------------------------------------------------------------------------------------- rules


def told(days: float) -> str:
    at = datetime.fromtimestamp(NOON, UTC) + timedelta(days=days)
    return f'expiry-date="{format_datetime(at, usegmt=True)}", rule-id="kvtier"'


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (told(3), ""),
        (told(4.5), ""),
        (told(2.9), "deletes after 2.9 days what is read for up to 3"),
        (told(33), "keeps dead epochs for 30 more days"),
        ("", "no rule covers v1/b/"),
        ('expiry-date="soon"', "no rule covers"),
    ],
)
def test_a_rule_is_judged_by_what_the_store_says_of_an_object(header: str, words: str) -> None:
    found = judge_rule(header, NOON, 1)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(("prefix", "under"), [("", "v1/b/"), ("some/prefix", "some/prefix/v1/b/")])
def test_rules_are_those_of_the_kind_of_store(scheme: str, prefix: str, under: str) -> None:
    text = rules(scheme, prefix, 7)
    assert json.loads(text)
    assert f'"{under}"' in text
    assert ": 21" in text
    assert rules("file", prefix, 7) == ""
