"""Units: every spelling is read, one is printed, and what is printed reads back."""

import random

import pytest

from kvtier.appliance.config import units


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("2Mi", 2 << 20),
        ("1.5GiB", 3 << 29),
        ("30gb", 30 * 10**9),
        ("3TiB", 3 << 40),
        ("0B", 0),
        (4096, 4096),
        ("4096", 4096),
    ],
)
def test_reads_bytes(text: object, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "64 furlongs", "-1GiB", -1, True, None, 1.5, "1.3B", "1e3MiB", "٣GiB"]
)
def test_refuses_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|whole number"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("7d", 604_800),
        ("1.5s", 1.5),
        (2, 2),
        (0.25, 0.25),
    ],
)
def test_reads_durations(text: object, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "30", "30 parsecs", "-1s", -1, True, None, float("nan"), float("inf"), "1s,2s"]
)
def test_refuses_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(("text", "share"), [("90%", 0.9), ("12.5 %", 0.125), (0.9, 0.9), (1, 1.0), (0, 0.0)])
def test_reads_shares(text: object, share: float) -> None:
    assert units.parse_fraction(text) == share


@pytest.mark.parametrize("text", ["0.9", "101%", 1.5, -0.1, True, None, "most"])
def test_refuses_what_is_no_share(text: object) -> None:
    with pytest.raises(ValueError, match="share"):
        units.parse_fraction(text)


def test_what_is_printed_reads_back() -> None:
    dice = random.Random(7)
    for _ in range(500):
        num_bytes = dice.randrange(1 << dice.randrange(1, 60)) << dice.choice([0, 10, 20])
        assert units.parse_bytes(units.format_bytes(num_bytes)) == num_bytes
        seconds = dice.randrange(10 ** dice.randrange(1, 10)) / 1000
        assert units.parse_duration(units.format_duration(seconds)) == seconds
        share = dice.randrange(1001) / 1000
        assert units.parse_fraction(units.format_fraction(share)) == share


def test_prints_one_way() -> None:
    assert units.format_bytes(1536 << 20) == "1536MiB"
    assert units.format_bytes(0) == "0B"
    assert units.format_duration(5400) == "1h30m"
    assert units.format_duration(0) == "0s"
    assert units.format_fraction(0.9) == "90%"
    assert units.format_fraction(1.0) == "100%"
    assert units.about_bytes(1.46 * (1 << 30)) == "1.46 GiB"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (units.about_bytes(1023 << 20), "1,023 MiB"),
        (units.about_bytes(1000 << 30), "1,000 GiB"),
        (units.about_bytes(1 << 30), "1 GiB"),
        (units.about_duration(0.9999), "1 s"),
        (units.about_duration(0.25), "250 ms"),
    ],
)
def test_what_people_read_has_no_exponent(text: str, seen: str) -> None:
    assert text == seen
