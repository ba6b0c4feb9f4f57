"""The policy file: where each value is from, other formats, what editors are told, and noticing a change."""

import json
import os
import random
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from kvtier.appliance.config import (
    LIVE,
    Origin,
    Settings,
    SettingsError,
    changes,
    fields,
    is_live,
    leaves,
    needing_restart,
    schema_text,
    units,
)
from kvtier.appliance.host.policy_watch import FileWatch, signature_of

from ...docs.settings_page import reference_table, setting_keys

#: Of them three of further memories, which can be any number, ten of a shared store: its five prices are a
#: site's, nothing measures them, and what others use of a model is not known here; four of other hosts, which
#: nothing can find out by itself; and seven of a directory: where it is, and how this host gets in.
MAX_SETTINGS = 79


def test_every_value_says_where_it_is_from(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "leases:\n  ttl: 10s\nlimits:\n  max_clients: 7\ntiers:\n  nvme: {path: /d,\n    capacity: 1TiB}\n"
    )
    env = {"KVTIER_LIMITS__MAX_CLIENTS": "3", "KVTIER_LIMITS__MAX_PINNED": "50%"}
    loaded = Origin(file, env, ("limits.max_pinned=60%", "tiers.dram.numa_nodes=[0, 1]")).load()
    sources = {key: (value, source) for key, value, source in loaded.rows()}
    assert sources["leases.ttl"] == ("10s", f"{file}:2")
    assert sources["limits.max_clients"] == (3, "KVTIER_LIMITS__MAX_CLIENTS")
    assert sources["limits.max_pinned"] == ("60%", "--set limits.max_pinned")
    assert sources["tiers.dram.numa_nodes"] == ([0, 1], "--set tiers.dram.numa_nodes")
    assert sources["tiers.nvme.path"] == ("/d", f"{file}:6")
    assert sources["tiers.nvme.capacity"] == ("1TiB", f"{file}:7")
    assert sources["tiers.nvme.durability"] == ("segment", "default"), "its tier is written, it is not"
    assert sources["limits.staging_per_client"] == ("64MiB", "default")
    assert [*sources] == [".".join(map(str, path)) for path, _ in leaves(loaded.settings.canonical())]


def test_an_origin_is_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("leases: {ttl: 10s}")
    origin = Origin(file, {}, ("limits.max_clients=5",))
    assert origin.load().settings.leases.ttl_s == 10
    file.write_text("leases: {ttl: 20s}\nlimits: {max_clients: 9}")
    settings = origin.load().settings
    assert (settings.leases.ttl_s, settings.limits.max_clients) == (20, 5), "the command line stays stronger"
    given = origin.load("leases: {ttl: 5s}", "other.yaml")
    assert (given.settings.leases.ttl_s, given.text) == (5, None)
    with pytest.raises(SettingsError, match=r"other\.yaml:1: leases\.ttl"):
        origin.load("leases: {ttl: soon}", "other.yaml")


# -------------------------------------------------------------------------------------- other formats


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("0", "is 0: write schema_version: 1"),
        ("-1", "is -1: write schema_version: 1"),
        ("one", "is 'one': write schema_version: 1"),
        ("2", "is 2: a newer kvtier wrote this file"),
    ],
)
def test_other_formats_are_refused_with_what_to_do(tmp_path: Path, version: str, advice: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"\nschema_version: {version}\nwatermark: {{high: 90}}")
    with pytest.raises(
        SettingsError, match=rf"policy\.yaml:2: schema_version: must be 1; {advice}"
    ) as caught:
        Settings.load(file, {})
    assert len(caught.value.problems) == 1, "of another format nothing else that is said would be true"


# ------------------------------------------------------------------------------------ what editors are told

UNITS = {
    fields.BYTES_PATTERN: units.parse_bytes,
    fields.SECONDS_PATTERN: units.parse_duration,
    fields.FRACTION_PATTERN: units.parse_fraction,
}
ALPHABET = re.split("/", "0/7/90/100/././.5/%/s/ms/m/h/d/B/b/K/k/Ki/i/GB/GiB/MiB/tb/-/1e3/ /")


def test_patterns_of_the_schema_accept_what_is_read_and_nothing_else() -> None:
    rng = random.Random(5)
    num_right = 0
    for _ in range(20_000):
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 4)))
        for pattern, parse in UNITS.items():
            try:
                parse(text)
                is_right = True
            except ValueError as problem:
                is_right = "not a whole number of bytes" in str(problem)  # arithmetic is not for patterns
            num_right += is_right
            assert bool(re.match(pattern, text)) == is_right, (text, parse.__name__)
    assert num_right > 1000


def test_schema_and_reference_know_every_setting() -> None:
    schema = json.loads(schema_text())
    assert schema["properties"]["limits"]["$ref"] == "#/$defs/LimitSettings"
    assert schema["additionalProperties"] is False
    table = reference_table()
    loaded = Origin(None, {}, ("tiers={hbm: {}, nvme: {path: /d, capacity: 1TiB}}",)).load()
    for key, _, _ in loaded.rows():
        assert f"| `{key}` |" in table, key


# ------------------------------------------------------------------------------------------ what is live


def test_every_live_key_is_a_setting() -> None:
    whole = Origin(None, {}, ("tiers={hbm: {}, nvme: {path: /d, capacity: 1TiB}}",)).load()
    keys = [".".join(map(str, path)) for path, _ in leaves(whole.settings.canonical())]
    for live in LIVE:
        assert any(is_live(key) and fnmatchcase(f"{key}.", f"{live}.*") for key in keys), live
    assert not is_live("policy.allowed_modules"), "which code may run is decided at the start"
    assert not is_live("tiers.dram.extent")
    assert not is_live("leases_and_more")


def test_changes_are_told_by_key() -> None:
    old = Settings.load(env={})
    new = Settings.load(env={}, overrides=["leases.ttl=5s", "reflection=false", "tiers.hbm.capacity=1GiB"])
    found = changes(old, new)
    assert [(one.key, one.was, one.becomes) for one in found if one.key != "tiers.hbm"] == [
        ("leases.ttl", "30s", "5s"),
        ("reflection", True, False),
    ]
    assert [one.key for one in needing_restart(found)] == ["tiers.hbm", "reflection"]
    assert changes(new, Settings.model_validate(yaml.safe_load(new.to_yaml()))) == []


# -------------------------------------------------------------------------------------------- the watch


def looks(watch: FileWatch, number: int = 3) -> list[bool]:
    return [watch.look() for _ in range(number)]


def test_a_file_is_read_when_it_stands_still(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("a")
    watch = FileWatch(file)
    assert looks(watch) == [False, True, False], "once after the start: it may have changed since it was read"
    file.write_text("ab")
    assert not watch.look(), "somebody may be writing"
    file.write_text("abc")
    assert looks(watch) == [False, True, False]
    other = tmp_path / "new"
    other.write_text("abc")
    os.replace(other, file)  # an editor that renames
    assert looks(watch) == [False, True, False]


def test_a_config_map_that_is_swapped_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "policy.yaml").write_text("same length")
    os.symlink("..1", tmp_path / "..data")
    os.symlink("..data/policy.yaml", file)
    watch = FileWatch(file)
    assert looks(watch) == [False, True, False]
    os.symlink("..2", tmp_path / "..data_tmp")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    assert looks(watch) == [False, True, False]


def test_a_file_that_goes_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("a")
    watch = FileWatch(file)
    looks(watch)
    file.unlink()
    assert signature_of(file) is None
    assert looks(watch) == [False, True, False]


def test_settings_are_few_and_each_says_what_it_is_for() -> None:
    """A new setting takes the place of another, or its author argues for a higher number here."""
    keys = setting_keys()
    assert len(keys) <= MAX_SETTINGS
    assert {"listen", "compression.rules[].layers", "tenants.NAME.quota.dram"} <= {*keys}
    assert not {"tiers", "tenants", "compression.rules", "access.tls"} & {*keys}, "a section is no setting"
    rows = [line.split(" | ") for line in reference_table().splitlines()[2:]]
    assert all(row[3].rstrip(" |").endswith(".") for row in rows), "every setting has a description"
    persons = re.compile(r"\b(who|whose|whoever|nobody|somebody|anyone asks|everybody)\b", re.I)
    assert not [row[0] for row in rows if persons.search(row[3])]


@pytest.mark.parametrize("key", ["limits.max_sessions", "leases.grace", "tiers.hbm.direct_devices"])
def test_a_key_of_a_former_version_is_an_unknown_key(key: str) -> None:
    with pytest.raises(SettingsError, match=f"--set {key}: unknown key; allowed here: "):
        Settings.load(env={}, overrides=["tiers.hbm.capacity=1GiB", f"{key}=1"])
