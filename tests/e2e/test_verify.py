"""A disk or memory that rots under a running daemon: found by the background pass and by `kvtier verify`."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance import scrubber
from kvtier.tiers.block import Tier
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1.shm import PAGE_BYTES, extent_of, slot_of

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..cli.conftest import run
from .scene import NUM_STORED, WAIT_S, Scene

FRAGMENT_BYTES = 16 << 10


def places_of(scene: Scene, tier: Tier) -> list[int]:
    """Return the places of all readable fragments in a tier."""
    catalog = scene.daemon.planner.catalog
    return sorted(place for place in catalog.place[tier] if place >= 0)


def rot_records(scene: Scene, folder: Path, places: list[int]) -> None:
    """Flip a bit of each record's payload on the device."""
    for place in places:
        with segment_path(folder / "nvme", extent_of(place)).open("r+b") as file:
            file.seek((slot_of(place) + 1) * PAGE_BYTES + 1000)
            [byte] = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def rot_slots(scene: Scene, places: list[int]) -> None:
    for place in places:
        scene.daemon.assembly.dram.view(place, FRAGMENT_BYTES)[1000] ^= 1


def verify(scene: Scene, *arguments: str) -> tuple[int, Any]:
    result = run("verify", *arguments, "--json", target=scene.address)
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # the background pass stands still after its first step, or it may find what a test is about to ask for
    monkeypatch.setattr(scrubber, "SHARE", 1e-9)
    monkeypatch.setattr(scrubber, "MIN_PASS_S", 3600.0)
    with DaemonThread(small_settings(tmp_path, nvme=True, write="through")) as running:
        yield running


def test_rot_is_found_on_demand_and_costs_no_block_that_another_tier_has(
    served: DaemonThread, tmp_path: Path
) -> None:
    scene = Scene(served)
    scene.until(lambda: len(places_of(scene, Tier.NVME)) == 2 * NUM_STORED and not scene.unrest())
    assert verify(scene)[0] == 0
    records, slots = places_of(scene, Tier.NVME), places_of(scene, Tier.DRAM)
    rot_records(scene, tmp_path, records[2:5])
    code, report = verify(scene, "nvme")
    assert (code, report["num_damaged"], report["num_blocks_lost"]) == (1, 3, 0)
    assert report["read"][0]["num_fragments"] == len(records)
    assert all("wrong_checksum" in one and "still readable from dram" in one for one in report["damaged"])
    scene.until(lambda: len(places_of(scene, Tier.NVME)) == len(records) and not scene.unrest())
    rot_slots(scene, slots[2:5])
    code, report = verify(scene, "dram")
    assert (code, report["num_damaged"], report["num_blocks_lost"]) == (1, 3, 0)
    assert all("still readable from nvme" in one for one in report["damaged"])
    scene.assert_unharmed()  # every block is read back right, from the other tier
    assert "condemned_nvme" in json.loads(run("status", "--json", target=scene.address).stdout)["counters"]
    assert verify(scene)[0] == 0


def test_what_rots_in_every_tier_is_lost_and_said_to_be(served: DaemonThread, tmp_path: Path) -> None:
    scene = Scene(served)
    scene.until(lambda: len(places_of(scene, Tier.NVME)) == 2 * NUM_STORED and not scene.unrest())
    scene.until(
        lambda: all(one.now or one.last for one in scene.daemon.scrubber.tiers.values())
    )  # stands still
    catalog = scene.daemon.planner.catalog
    fragment = catalog.first_fragment[catalog.find(scene.namespace.namespace_id, scene.blocks[5])]
    rot_records(scene, tmp_path, [catalog.place[Tier.NVME][fragment]])
    rot_slots(scene, [catalog.place[Tier.DRAM][fragment]])
    assert run("verify", "dram", target=scene.address).exit_code == 1
    found = run("verify", "nvme", target=scene.address)
    assert found.stdout.splitlines()[-1] == "1 fragment damaged, 1 block lost"
    assert f"block {scene.namespace.namespace_id}:{scene.blocks[5].hex()[:8]}, lost" in found.stdout
    assert scene.lookup(scene.blocks) == 5


def test_the_background_finds_it_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(scrubber, "SHARE", 0.5)
    monkeypatch.setattr(scrubber, "MIN_PASS_S", 0.05)
    dice = random.Random(17)
    with DaemonThread(small_settings(tmp_path, nvme=True, write="through")) as served:
        scene = Scene(served)
        scene.until(lambda: len(places_of(scene, Tier.NVME)) == 2 * NUM_STORED and not scene.unrest())
        scrubs = scene.daemon.scrubber.tiers

        def num_passes() -> list[int]:
            return [one.num_passes for one in scrubs.values()]

        begun = num_passes()
        scene.until(lambda: min(now - was for now, was in zip(num_passes(), begun, strict=True)) >= 2)
        assert [one.num_damaged for one in scrubs.values()] == [0, 0]
        rot_slots(scene, dice.sample(places_of(scene, Tier.DRAM), 3))
        scene.until(lambda: scrubs[Tier.DRAM].num_damaged == 3)
        rot_records(scene, tmp_path, dice.sample(places_of(scene, Tier.NVME), 3))
        scene.until(lambda: scrubs[Tier.NVME].num_damaged == 3)
        shown = run("status", target=scene.address).stdout
        assert "verified dram: " in shown
        assert "3 fragments were damaged: see the log" in shown
        numbers = json.loads(run("status", "--json", target=scene.address).stdout)["scrubs"]
        assert [(one["tier"], one["num_damaged"]) for one in numbers] == [("dram", 3), ("nvme", 3)]
        record_property("rot_found", sum(one["num_damaged"] for one in numbers))


def test_a_folder_is_verified_after_the_daemon_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_TARGET", f"unix://{tmp_path}/other.sock")  # as in the systemd unit and in pods
    with DaemonThread(small_settings(tmp_path, nvme=True)) as served:
        scene = Scene(served)
        served.wait(served.daemon.drain(60.0))
        refused = run("verify", "--data", str(tmp_path / "nvme"))
        assert refused.exit_code == 1
        assert "ask that daemon, or stop it" in refused.stderr
        records = places_of(scene, Tier.NVME)
    assert run("verify", "--data", str(tmp_path / "nvme")).exit_code == 0
    rot_records(scene, tmp_path, records[:4])
    result = run("verify", "--data", str(tmp_path / "nvme"), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["num_damaged"], report["num_blocks_lost"]) == (1, 4, 2)
    assert report["read"][0]["num_fragments"] == len(records)


def test_a_pass_under_way_ends_with_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "SHARE", 1e-6)
    monkeypatch.setattr(scrubber, "MIN_PASS_S", 0.0)
    with DaemonThread(small_settings(tmp_path)) as served:
        Scene(served)
        began_at = time.monotonic()
    assert time.monotonic() - began_at < WAIT_S


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "hbm"), "BAD_TIER: tier hbm has nothing to verify here; these have: dram, nvme"),
        (("verify", "--master-key", "/dev/null"), "--master-key"),
        (("verify", "dram", "--data", "/"), "leave TIER and --target out"),
    ],
)
def test_wrong_words_are_refused(served: DaemonThread, arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments, target=served.daemon.grpc.addresses[0] if "--data" not in arguments else None)
    assert result.exit_code in (1, 2)
    assert words in result.stderr
