"""Settings: read from every source, checked across fields, and refused with the place and the fix."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.appliance.config import Policy, Settings, SettingsError
from kvtier.appliance.core.options import PlannerOptions
from kvtier.tiers.block import Tier

WHOLE = """\
schema_version: 1
listen: unix:///tmp/kvtier.sock
tiers:
  hbm: {capacity: 512MiB, backend: host}
  dram:
    capacity: 4GiB
    extent: 128MiB
    hugepages: off
    lock: true
    numa_nodes: [0, 2]
  nvme:
    path: /var/lib/kvtier
    capacity: 1TB
    segment: 256MiB
    durability: record
leases: {ttl: 90s}
limits: {max_clients: 8, staging_per_client: 16MiB, max_pinned: 0.45}
reflection: false
"""


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None, *overrides: str) -> Settings:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return Settings.load(path, env or {}, overrides)


def test_reads_a_whole_policy(tmp_path: Path) -> None:
    settings = load(tmp_path, WHOLE)
    assert settings.listen == ["unix:///tmp/kvtier.sock"]
    assert settings.tiers.hbm is not None
    assert settings.tiers.sizes[Tier.HBM].num_units == 4, "in extents of dram's size"
    assert settings.tiers.dram.num_extents == 32
    assert (settings.tiers.dram.hugepages, settings.tiers.dram.lock) == ("off", True)
    assert settings.tiers.nvme is not None
    assert settings.tiers.nvme.path == Path("/var/lib/kvtier")
    assert settings.tiers.nvme.num_segments == 10**12 // (256 << 20)
    assert settings.leases.ttl_s == 90
    assert (settings.limits.staging_per_client_bytes, settings.limits.max_pinned) == (16 << 20, 0.45)
    assert not settings.reflection


def test_canonical_form_reads_back_equal(tmp_path: Path) -> None:
    settings = load(tmp_path, WHOLE)
    assert load(tmp_path, settings.to_yaml()) == settings
    assert yaml.safe_load(settings.to_yaml())["limits"]["max_pinned"] == "45%"
    assert settings.canonical()["leases"]["ttl"] == "1m30s"


def test_an_empty_policy_is_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing\n") == Settings.load(env={})


def test_the_variable_that_names_the_file_is_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("leases: {ttl: 7s}")
    assert Settings.load(file, {"KVTIER_POLICY": str(file)}).leases.ttl_s == 7


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    text = "leases: {ttl: 10s}\nlimits: {max_clients: 1, max_pinned: 30%}\n"
    env = {"KVTIER_LEASES__TTL": "20s", "KVTIER_LIMITS__MAX_CLIENTS": "3"}
    settings = load(tmp_path, text, env, "leases.ttl=25s")
    limits = settings.limits
    assert (settings.leases.ttl_s, limits.max_clients, limits.max_pinned) == (25, 3, 0.3)
    assert limits.staging_per_client_bytes == 64 << 20


@pytest.mark.parametrize("word", ["auto", "on", "off"])
def test_a_switch_may_be_a_bare_word_of_yaml(tmp_path: Path, word: str) -> None:
    """YAML reads a bare `on` or `off` as a truth value."""
    overrides = [f"tiers.hbm.{setting}" for setting in ("capacity=1GiB", f"from_nvme={word}")]
    tiers = load(tmp_path, "", {}, *overrides, f"tiers.dram.hugepages={word}").tiers
    assert tiers.hbm is not None
    assert (tiers.hbm.from_nvme, tiers.dram.hugepages) == (word, word)


def test_overrides_are_yaml_and_open_tiers_that_were_null(tmp_path: Path) -> None:
    overrides = ["tiers.nvme.path=/data", "tiers.nvme.capacity=1GiB", "tiers.dram.numa_nodes=[0, 1]"]
    settings = load(tmp_path, "tiers: {nvme: null}", {}, *overrides)
    assert settings.tiers.nvme is not None
    assert settings.tiers.nvme.num_segments == 16
    assert settings.tiers.dram.numa_nodes == [0, 1]
    assert load(tmp_path, WHOLE, {}, "tiers.nvme=null").tiers.nvme is None


def test_variables_that_kubernetes_injects_are_no_settings() -> None:
    env = {"KVTIER_PORT": "tcp://10.0.0.1:50051", "KVTIER_SERVICE_HOST": "10.0.0.1", "KVTIER_TARGET": "x:1"}
    assert Settings.load(env=env) == Settings.load(env={})
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    for service in (
        "KVTIER_OLD__STORE",
        "KVTIER_TIERS__OLD",
    ):  # kvtier-old--store, ...
        env = {f"{service}_{name}": "10.0.0.1" for name in names}
        assert Settings.load(env=env) == Settings.load(env={})
        with pytest.raises(SettingsError, match=f"{service}_PORTS"):
            Settings.load(env={**env, f"{service}_PORTS": "1"})
    with pytest.raises(SettingsError, match="KVTIER_OLD__STORE_PORT"):
        Settings.load(env={"KVTIER_OLD__STORE_PORT": "1"})  # without its host it is of no Service


def test_planner_options_follow_the_settings() -> None:
    assert Settings.load(env={}).planner_options() == PlannerOptions()  # one set of defaults, not two
    overrides = [
        "limits.max_clients=3",
        "limits.max_pinned=7%",
        "leases.ttl=12s",
    ]
    options = Settings.load(env={}, overrides=overrides).planner_options()
    defaults = PlannerOptions()
    changed = [f.name for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name)]
    assert len(changed) == len(overrides)
    assert (options.max_clients, options.max_pinned_fraction, options.lease_ttl_s) == (3, 0.07, 12)


@pytest.mark.parametrize(
    ("written", "daily_bytes"),
    [("auto", 4 << 30), ("unlimited", None), ("2TiB", 2 << 40), (str(1 << 30), 1 << 30)],
)
def test_daily_writes_are_a_size_or_a_word(written: str, daily_bytes: int | None) -> None:
    overrides = ["tiers.nvme.path=/d", "tiers.nvme.capacity=4GiB", f"tiers.nvme.daily_writes={written}"]
    settings = Settings.load(env={}, overrides=[*overrides, "tiers.nvme.write=through"])
    options = settings.planner_options()
    assert (options.write, options.daily_write_bytes) == ("through", daily_bytes)
    assert Settings.model_validate(settings.canonical()) == settings


# --------------------------------------------------------------------------------- malformed policies

#: What is written, the line it is refused in, the path named, words of the sentence.
MALFORMED = {
    "unknown key": (
        "leases:\n  lese_ttl: 30s",
        2,
        "leases.lese_ttl",
        "unknown key; allowed here: ttl",
    ),
    "near miss": ("tiers:\n  dram:\n    capcity: 1GiB", 3, "tiers.dram.capcity", "did you mean 'capacity'?"),
    "attribute": (
        "tiers:\n  dram: {capacity_bytes: 1}",
        2,
        "tiers.dram.capacity_bytes",
        "did you mean 'capacity'?",
    ),
    "elsewhere": ("eviction: lru", 1, "eviction", "did you mean 'policy.eviction'?"),
    "unknown top": ("\n\ncapacity: 1GiB", 3, "capacity", "allowed here: schema_version, listen, tiers"),
    "unknown in a tenant": (
        "tenants:\n  acme:\n    members: [uid:1]\n    member: [uid:1]",
        4,
        "tenants.acme.member",
        "did you mean 'members'?",
    ),
    "unknown in a quota": (
        "tenants:\n  acme:\n    members: [uid:1]\n    quota: {ram: 1GiB}",
        4,
        "tenants.acme.quota.ram",
        "allowed here: ",
    ),
    "no tenant": ("tenants:\n  acme: 7", 2, "tenants.acme", "must be a mapping with the keys members"),
    "unknown tier": ("tiers:\n  ssd: {}", 2, "tiers.ssd", "allowed here: hbm, dram, nvme"),
    "twice": ("reflection: true\nreflection: false", 2, "", "'reflection' is written twice, first in line 1"),
    "twice deep": ("leases:\n  ttl: 1s\n  ttl: 2s", 3, "", "'ttl' is written twice"),
    "bad size": (
        "tiers:\n  dram:\n    capacity: 64 furlongs",
        3,
        "tiers.dram.capacity",
        "like 512MiB, 64GiB",
    ),
    "no size": ("tiers:\n  dram:\n    capacity:", 3, "tiers.dram.capacity", "not a size"),
    "size is a list": ("tiers: {dram: {capacity: [1]}}", 1, "tiers.dram.capacity", "not a size"),
    "capacity < extent": (
        "tiers:\n  dram:\n    capacity: 1MiB",
        3,
        "tiers.dram.capacity",
        "raise capacity or lower dram.extent",
    ),
    "odd extent": (
        "tiers:\n  dram:\n    extent: 3MiB",
        3,
        "tiers.dram.extent",
        "not a multiple of 2MiB; write 4MiB",
    ),
    "zero extent": ("tiers:\n  dram:\n    extent: 0B", 3, "tiers.dram.extent", "write 2MiB"),
    "many extents": (
        "tiers:\n  dram:\n    capacity: 4TiB",
        2,
        "tiers.dram.extent",
        "limit 16384; write 256MiB",
    ),
    "hugepages": (
        "tiers:\n  dram:\n    hugepages: maybe",
        3,
        "tiers.dram.hugepages",
        "'auto', 'on' or 'off'",
    ),
    "backend": ("tiers:\n  hbm:\n    backend: rocm", 3, "tiers.hbm.backend", "'host' or 'cuda'"),
    "lock": ("tiers:\n  dram:\n    lock: 1", 3, "tiers.dram.lock", "true or false"),
    "node twice": (
        "tiers:\n  dram:\n    numa_nodes: [0, 0]",
        3,
        "tiers.dram.numa_nodes",
        "each NUMA node once",
    ),
    "node is text": (
        "tiers:\n  dram:\n    numa_nodes:\n    - a",
        4,
        "tiers.dram.numa_nodes.0",
        "whole number",
    ),
    "nodes no list": ("tiers:\n  dram:\n    numa_nodes: 0", 3, "tiers.dram.numa_nodes", "must be a list"),
    "no dram": ("tiers:\n  dram: null", 2, "tiers.dram", "mapping with the keys capacity, extent"),
    "tier is text": ("tiers:\n  nvme: /data", 2, "tiers.nvme", "mapping with the keys path, capacity"),
    "no path": ("tiers:\n  nvme:\n    capacity: 1GiB", 2, "tiers.nvme.path", "must be given: Directory"),
    "no capacity": (
        "tiers:\n  nvme:\n    path: /data",
        2,
        "tiers.nvme.capacity",
        "must be given: Disk space",
    ),
    "relative": ("tiers:\n  nvme: {capacity: 1GiB,\n    path: data}", 3, "tiers.nvme.path", "absolute path"),
    "home": ("tiers:\n  nvme: {capacity: 1GiB,\n    path: ~/kv}", 3, "tiers.nvme.path", "absolute path"),
    "odd segment": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 1GiB\n    segment: 1000001B",
        5,
        "tiers.nvme.segment",
        "not a multiple of 4KiB; write 980KiB",
    ),
    "tiny segment": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 1GiB\n    segment: 4KiB",
        5,
        "tiers.nvme.segment",
        "outside 1MiB to 16GiB",
    ),
    "two segments": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 128MiB",
        4,
        "tiers.nvme.capacity",
        "at least 3 are needed; write 192MiB or more",
    ),
    "durability": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 1GiB\n    durability: fsync",
        5,
        "tiers.nvme.durability",
        "'none', 'segment' or 'record'",
    ),
    "when to write": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 1GiB\n    write: always",
        5,
        "tiers.nvme.write",
        "'spill', 'idle' or 'through'",
    ),
    "writes a day": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 1GiB\n    daily_writes: much",
        5,
        "tiers.nvme.daily_writes",
        "or `auto`, or `unlimited`",
    ),
    "few writes": (
        "tiers:\n  nvme:\n    path: /d\n    capacity: 1GiB\n    daily_writes: 1MiB",
        5,
        "tiers.nvme.daily_writes",
        "less than one segment of 64MiB; write 64MiB or more, or `write: spill`",
    ),
    "few digits": (
        "object:\n  namespaces: {3f2a: off}",
        2,
        "object.namespaces.3f2a.[key]",
        "[0-9a-f]{8,128}",
    ),
    "no digits": (
        "object:\n  namespaces: {model-one: off}",
        2,
        "object.namespaces.model-one.[key]",
        "[0-9a-f]{8,128}",
    ),
    "share of 90": ("limits:\n  max_pinned: 90", 2, "limits.max_pinned", "like 90% or 0.9"),
    "ttl > max": ("leases:\n  ttl: 20m", 2, "leases.ttl", "longer than 10m, the longest lease"),
    "no time": ("leases:\n  ttl: 0s", 2, "leases.ttl", "longer than 0s"),
    "bare number": ("leases:\n  ttl: '30'", 2, "leases.ttl", "like 500ms, 30s or 10m"),
    "clients": ("limits:\n  max_clients: many", 2, "limits.max_clients", "whole number"),
    "no clients": ("limits:\n  max_clients: 0", 2, "limits.max_clients", "greater than or equal to 1"),
    "true clients": ("limits:\n  max_clients: true", 2, "limits.max_clients", "whole number"),
    "half a client": ("limits:\n  max_clients: 1.5", 2, "limits.max_clients", "whole number"),
    "odd staging": ("limits:\n  staging_per_client: 5000B", 2, "limits.staging_per_client", "write 8KiB"),
    "nothing pinned": ("limits:\n  max_pinned: 0%", 2, "limits.max_pinned", "write 50%"),
    "version": ("schema_version: 2", 1, "schema_version", "must be 1; is 2"),
    "listen": ("listen: kvtier.sock", 1, "listen", "unix:///absolute/path or host:port"),
    "listen port": ("listen: localhost:70000", 1, "listen", "not an address"),
    "listen nowhere": ("listen: []", 1, "listen", "an address or a list of them"),
    "listen twice": ("listen: ['unix:/a', 'unix:///a']", 1, "listen", "names an address twice"),
    "listen relative": ("listen: unix:kvtier.sock", 1, "listen", "a socket's path is absolute"),
    "listen long": (f"listen: unix:///{'x' * 101}", 1, "listen", "at most 100 bytes"),
    "reflection": ("reflection: maybe", 1, "reflection", "true or false"),
    "not a mapping": ("\n- a\n- b", 2, "", "a policy is a mapping"),
    "just text": ("hello", 1, "", "a policy is a mapping"),
    "not yaml": ("tiers:\n  dram: {capacity: 1GiB\nleases: {}", 3, "", "not valid YAML"),
    "tab": ("tiers:\n\tdram: {}", 2, "", "not valid YAML"),
    "two documents": ("reflection: true\n---\nreflection: true", 2, "", "expected a single document"),
    "alias": ("leases: &x {ttl: 1s}\nlimits: *x", 1, "", "anchors and aliases"),
    "loop": ("tiers: &x\n  dram: *x", 1, "", "anchors and aliases"),
    "merge": ("leases:\n  <<: {ttl: 1s}", 2, "", "merge keys"),
    "tag": ("leases: !!python/object:os.system {}", 1, "", "tag"),
    "tag on a value": ("reflection: !!python/name:os.system x", 1, "", "not valid YAML"),
    "no plain key": ("? [a]\n: 1", 1, "", "a key must be a plain word"),
    "date": ("leases:\n  ttl: 2026-13-77", 0, "", "a value cannot be read"),
    "deep": ("[" * 5000, 0, "", "nested too deeply"),
    "control": ("leases: \x01", 0, "", "not valid YAML"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_policy_is_refused_with_file_line_path_and_fix(name: str, tmp_path: Path) -> None:
    text, line, path, words = MALFORMED[name]
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    file = tmp_path / "policy.yaml"
    assert problem.source == (f"{file}:{line}" if line else str(file))
    assert problem.path == path
    assert words in problem.sentence
    assert str(caught.value) == ": ".join(filter(None, problem))


def test_an_unknown_key_is_told_wherever_it_stands() -> None:
    """In every mapping of the settings, those in lists and those whose names somebody chose among them."""
    whole: dict[str, Any] = {
        **Settings().canonical(),
        "tiers": {"hbm": {}, "dram": {}, "nvme": {"path": "/d", "capacity": "1GiB"}},
        "tenants": {"acme": {"members": ["uid:1"], "quota": {"dram": "1GiB"}}},
        "access": {"tls": {"certificate": "/c", "key": "/k", "client_ca": "/a"}, "admin": ["uid:0"]},
        "compression": {"rules": [{"codec": "planes"}]},
    }
    places = set(mappings(whole)) - FREE
    assert ("tenants", "acme", "quota") in places
    assert ("compression", "rules", 0) in places
    for place in places:
        changed = json.loads(json.dumps(whole))
        here: Any = changed
        for key in place:
            here = here[key]
        here["surprise"] = 1
        with pytest.raises(SettingsError) as caught:
            Settings.load_traced(Path("policy.yaml"), {}, text=json.dumps(changed))
        told = [problem for problem in caught.value.problems if problem.path.endswith("surprise")]
        assert [problem.path for problem in told] == [".".join(map(str, (*place, "surprise")))]
        assert "unknown key; allowed here: " in told[0].sentence


#: Mappings whose keys somebody chooses.
FREE: set[tuple[str | int, ...]] = {
    ("tenants",),
    ("policy", "tiers"),
    ("policy", "options"),
    ("object", "namespaces"),
}


def mappings(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield where in plain values there are mappings."""
    if isinstance(value, dict):
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield from mappings(below, (*path, key))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, "leases: {ttl: 20m}\nreflection: 7\nnothing: 1", {}, "limits.max_pinned=0%")
    assert [problem.path for problem in caught.value.problems] == [
        "leases.ttl",
        "limits.max_pinned",
        "reflection",
        "nothing",
    ]
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("env", "overrides", "source", "words"),
    [
        ({"KVTIER_LEASES__TTL": "soon"}, [], "KVTIER_LEASES__TTL", "leases.ttl: 'soon' is not a duration"),
        ({"KVTIER_LEASES__TLT": "1s"}, [], "KVTIER_LEASES__TLT", "did you mean 'ttl'?"),
        ({"KVTIER_LEASE__TTL": "1s"}, [], "KVTIER_LEASE__TTL", "did you mean 'leases'?"),
        ({"KVTIER_LISTEN": "[a"}, [], "KVTIER_LISTEN", "not valid YAML"),
        (
            {"KVTIER_REFLECTION__DEEP": "1"},
            ["reflection.deep.er=1"],
            "--set reflection.deep.er",
            "is a value",
        ),
        ({}, ["tiers.dram.capacity"], "--set tiers.dram.capacity", "write it like --set"),
        ({}, ["tiers..capacity=1"], "--set tiers..capacity=1", "write it like --set"),
        ({}, ["tiers.dram.capacity="], "--set tiers.dram.capacity", "not a size"),
        (
            {},
            ["tiers.dram.capacity=1MiB"],
            "--set tiers.dram.capacity",
            "raise capacity or lower dram.extent",
        ),
    ],
)
def test_other_sources_are_named_too(
    env: dict[str, str], overrides: list[str], source: str, words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(None, env, overrides)
    assert caught.value.problems[0].source == source
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: cannot be read: No such file"):
        Settings.load(tmp_path / "absent.yaml", {})
    (tmp_path / "latin.yaml").write_bytes(b"listen: \xff")
    with pytest.raises(SettingsError, match="not UTF-8"):
        Settings.load(tmp_path / "latin.yaml", {})
    (tmp_path / "huge.yaml").write_text("#" * (1 << 20) + "\n#")
    with pytest.raises(SettingsError, match="it is larger than 1048576 bytes"):
        Settings.load(tmp_path / "huge.yaml", {})


def test_settings_are_frozen() -> None:
    settings = Settings.load(env={})
    with pytest.raises(ValueError, match="frozen"):
        settings.reflection = False


def test_every_setting_is_described() -> None:
    schema = Settings.model_json_schema()
    for name, model in {"Settings": schema, **schema["$defs"]}.items():
        for key, value in model["properties"].items():
            assert value.get("description"), f"{name}.{key} has no description"


def test_a_pool_is_refused_where_what_is_stored_has_to_be_encrypted(tmp_path: Path) -> None:
    text = "object: {url: 'mooncake://master:50051'}\n"
    assert load(tmp_path, text).object.is_pool
    with pytest.raises(SettingsError, match="nothing in it is encrypted; name another store"):
        load(tmp_path, f"{text}encryption: {{master_key: /etc/kvtier/master.key}}\n")
    with pytest.raises(SettingsError, match="mooncake://MASTER:PORT"):
        load(tmp_path, "object: {url: 'mooncake://master'}\n")


def test_options_of_a_policy_for_replays_are_checked_like_others() -> None:
    assert Policy(options={"clairvoyant": {}}).objection() == "", "it is not in use"
    assert "no option 'depth'" in Policy(options={"clairvoyant": {"depth": 1}}).objection()
    assert "kvtier replay" in Policy(eviction="clairvoyant").objection()
