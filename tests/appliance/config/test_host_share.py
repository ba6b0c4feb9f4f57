"""How much dram a daemon takes that nobody told: of hosts that are not this one."""

from pathlib import Path

import pytest

from kvtier.appliance.config import Origin, Settings, SettingsError, changes, host_share
from kvtier.appliance.config.host_memory import HostMemory
from kvtier.appliance.config.host_share import auto_bytes
from kvtier.appliance.host import process
from kvtier.appliance.preflight import table

from ..loops import DaemonThread

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 64 GiB, of which 60 are available."""
    monkeypatch.setattr(host_share, "host_memory", lambda: HostMemory(64 * GIB, 60 * GIB))


@pytest.mark.parametrize(
    ("total", "available", "expected"),
    [
        (64 * GIB, 60 * GIB, 16 * GIB),  # a quarter
        (64 * GIB, 8 * GIB, 4 * GIB),  # a runtime was here first: half of what it left
        (2048 * GIB, 2000 * GIB, 32 * GIB),  # the cap
        (10 * GIB + 1, 9 * GIB, 2560 * MIB),  # whole extents
        (512 * MIB, 400 * MIB, 256 * MIB),  # the floor, which the check of memory may refuse
        (0, 0, 256 * MIB),  # unknown
    ],
)
def test_what_auto_is(total: int, available: int, expected: int) -> None:
    assert auto_bytes(HostMemory(total, available)) == expected


def test_a_share_is_kept_as_it_was_written(host: None) -> None:
    def dram(*overrides: str) -> Settings:
        return Settings.load(env={}, overrides=overrides)

    default, share, size = (
        dram(),
        dram("tiers.dram.capacity=12.5%"),
        dram("tiers.dram.capacity=3GiB"),
    )
    assert [s.tiers.dram.capacity_bytes for s in (default, share, size)] == [16 * GIB, 8 * GIB, 3 * GIB]
    assert [s.canonical()["tiers"]["dram"]["capacity"] for s in (default, share, size)] == [
        "auto",
        "12.5%",
        "3GiB",
    ]
    assert default.tiers.dram.num_extents == 256
    again = Settings.load_traced(Path("x.yaml"), {}, text=share.to_yaml())[1]
    assert (again, again.tiers.dram.capacity_bytes) == (share, 8 * GIB)
    (change,) = changes(default, size)
    assert (change.key, change.was, change.becomes, change.is_live) == (
        "tiers.dram.capacity",
        "auto",
        "3GiB",
        True,
    )


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (
            "lots",
            "'lots' is not a size; write it like 512MiB, 64GiB or 3TiB; or a share of the host's memory",
        ),
        ("101%", "'101%' is not a share"),
        ("0%", "0B is less than one extent"),
        ("true", "True is not a size"),
    ],
)
def test_what_is_no_capacity_is_refused(host: None, capacity: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.load(env={}, overrides=[f"tiers.dram.capacity={capacity}"])


def test_a_default_never_takes_more_than_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a host whose memory is nearly all in use."""
    poor = HostMemory(256 * GIB, 2 * GIB)
    monkeypatch.setattr(host_share, "host_memory", lambda: poor)
    monkeypatch.setattr("kvtier.appliance.preflight.probes.available_bytes", lambda: poor.available_bytes)
    settings = Settings.load(env={}, overrides=[f"listen=unix://{tmp_path}/k.sock", "observe.http=off"])
    assert settings.tiers.dram.capacity_bytes == GIB
    assert "memory" not in {check.name for check in table.require(settings)}


def test_a_reload_keeps_the_size_that_was_chosen_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's own memory is not available any more when its policy is read again: it is asked once."""
    seen: list[HostMemory] = []

    def look() -> HostMemory:
        seen.append(HostMemory(GIB, GIB))
        return seen[-1]

    host_share.host_memory.cache_clear()
    monkeypatch.setattr(host_share, "read_memory", look)
    policy = tmp_path / "policy.yaml"
    text = f"listen: unix://{tmp_path}/k.sock\nobserve: {{http: off}}\ntiers: {{dram: {{extent: 2MiB}}}}\n"
    policy.write_text(text)
    try:
        with DaemonThread(Origin(policy, {}).load()) as running:
            policy.write_text(f"{text}leases: {{ttl: 9s}}\n")
            applied = running.wait(running.daemon.reload.apply())
            assert [change.key for change in applied.changes] == ["leases.ttl"]
            assert running.daemon.settings.tiers.dram.capacity_bytes == 256 * MIB
    finally:
        host_share.host_memory.cache_clear()
    assert len(seen) == 1


# ------------------------------------------------------------------------------------ the ready line


def test_the_ready_line_says_how_little_a_default_is(host: None) -> None:
    said = process.holding(Settings.load(env={}).tiers)
    assert said == (
        "dram 16 GiB (131,072 tokens); a token of Llama 3.1 8B is 128 KiB; for more: "
        "--set tiers.dram.capacity=50% "
        "--set tiers.nvme.path=/var/lib/kvtier --set tiers.nvme.capacity=100GiB"
    )
    hints = [word for word in said.partition("for more: ")[2].split() if word != "--set"]
    more = Settings.load(env={}, overrides=hints)
    assert (more.tiers.dram.capacity_bytes, more.tiers.nvme is not None) == (32 * GIB, True), (
        "it can be typed"
    )


def test_the_ready_line_of_what_was_chosen_gives_no_advice(host: None) -> None:
    chosen = ["tiers.dram.capacity=1GiB", "tiers.nvme.path=/data", "tiers.nvme.capacity=1TiB"]
    said = process.holding(Settings.load(env={}, overrides=chosen).tiers)
    assert said == (
        "dram 1 GiB (8,192 tokens), nvme 1 TiB (8,388,608 tokens); a token of Llama 3.1 8B is 128 KiB"
    )
