"""Policies that are refused, with the place and the fix."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.config import Settings, SettingsError

from .test_settings import load

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
