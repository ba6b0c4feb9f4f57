"""Memories below dram in the settings: names, order, sizes, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.config import Settings, SettingsError, changes, needing_restart
from kvtier.appliance.preflight import checks_host, probes
from kvtier.appliance.preflight.verdicts import CheckVerdict
from kvtier.tiers.ladder import STANDARD

from ...cli.test_doctor import HOST

GIB = 1 << 30
CXL: dict[str, Any] = {"kind": "memory", "capacity": "64GiB", "numa_nodes": [1]}
NVME = {"path": "/d", "capacity": "1TiB"}
TWO_NODES = (probes.Node(0, True, 256 * GIB), probes.Node(1, False, 128 * GIB))


def settings(**tiers: Any) -> Settings:
    """Return settings with these tiers."""
    return Settings.model_validate({"tiers": {"dram": {"capacity": "8GiB"}, **tiers}})


def test_the_order_of_further_tiers_is_that_of_the_ladder() -> None:
    tiers = settings(nvme=NVME, far={**CXL, "capacity": "1GiB"}, cxl=CXL).tiers
    assert [tier.label for tier in tiers.ladder.tiers] == ["hbm", "dram", "far", "cxl", "nvme"]
    assert {tier.label: size.num_units for tier, size in tiers.sizes.items()} == {
        "dram": 128,
        "far": 16,
        "cxl": 1024,
        "nvme": 16384,
    }
    assert settings().tiers.ladder.tiers == STANDARD.tiers


def test_what_is_printed_reads_back(tmp_path: Path) -> None:
    whole = settings(far=CXL, cxl=CXL, nvme=NVME)
    path = tmp_path / "policy.yaml"
    path.write_text(whole.to_yaml())
    again = Settings.load(path, {}, ["tiers.cxl.capacity=1GiB"])
    assert [*again.tiers.further] == ["far", "cxl"]
    assert again.tiers.further["cxl"].capacity_bytes == GIB


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tiers.drm={capacity: 1GiB}", "tiers.drm: unknown key.*kind: memory; did you mean 'dram'"),
        ("tiers.cxl=64GiB", "tiers.cxl: unknown key; allowed here: hbm, dram, nvme, or a memory"),
        ("tiers.cxl={kind: segments, capacity: 1GiB}", "kind: must be 'memory'; is 'segments'"),
        ("tiers.cxl={kind: memory}", "tiers.cxl.capacity: must be given"),
        ("tiers.cxl={kind: memory, capacity: 1KiB}", "less than one extent of 64MiB; raise capacity"),
        ("tiers.cxl={kind: memory, capacity: 1GiB, extent: 2MiB}", "unknown key; allowed here: kind, cap"),
        ("tiers.cxl={kind: memory, capacity: 1GiB, numa_nodes: [1, 1]}", "name each NUMA node once"),
        ("tiers.staging={kind: memory, capacity: 1GiB}", "'staging' cannot name a tier"),
        ("tiers.Far={kind: memory, capacity: 1GiB}", "'Far' cannot name a tier"),
        ("tenants={a: {members: [uid:1], quota: {cxl: 1GiB}}}", "quota.cxl: unknown key; allowed here: hbm"),
    ],
)
def test_wrong_tiers_name_the_fix(override: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.load(None, {}, [override])


def test_a_name_used_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("tiers:\n  cxl: {kind: memory, capacity: 1GiB}\n  cxl: {kind: memory, capacity: 2GiB}\n")
    with pytest.raises(SettingsError, match="'cxl' is written twice, first in line 2"):
        Settings.load(path, {})


def test_too_many_tiers_and_a_gpu_beside_one_are_refused() -> None:
    with pytest.raises(ValueError, match="9 further memories, limit 8"):
        settings(**{f"m{number}": CXL for number in range(9)})
    with pytest.raises(ValueError, match="a GPU's hbm has copies to and from dram and nvme only"):
        settings(hbm={"backend": "cuda"}, cxl=CXL)


def test_only_the_capacity_changes_without_a_restart() -> None:
    old = settings(far=CXL, cxl=CXL)
    larger = settings(far=CXL, cxl={**CXL, "capacity": "96GiB"})
    assert needing_restart(changes(old, larger)) == []
    elsewhere = settings(far=CXL, cxl={**CXL, "numa_nodes": []})
    for changed in (settings(cxl=CXL), settings(cxl=CXL, far=CXL), elsewhere):
        assert needing_restart(changes(old, changed))


@pytest.mark.parametrize(
    ("tier", "verdict", "words"),
    [
        (CXL, CheckVerdict.OK, r"cxl is taken from \[1\]"),
        ({**CXL, "numa_nodes": [7]}, CheckVerdict.FAIL, "no node 7.*tiers.cxl.numa_nodes"),
        ({**CXL, "capacity": "129GiB"}, CheckVerdict.FAIL, "which have less.*write 128 GiB or less"),
        ({**CXL, "numa_nodes": []}, CheckVerdict.WARN, "cxl may be taken from the memory that dram"),
    ],
)
def test_nodes_of_a_further_tier_are_checked(tier: dict[str, Any], verdict: CheckVerdict, words: str) -> None:
    check = checks_host.check_numa(replace(HOST, nodes=TWO_NODES), settings(cxl=tier))
    assert check.verdict is verdict
    assert re.search(words, f"{check} {check.setting}")
