"""Reloading a real daemon: what is refused is refused whole, what is applied holds at once."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bench.reload import play
from kvtier.appliance.config import Origin
from kvtier.appliance.errors import ApplianceError
from kvtier.appliance.host import reload as reload_module
from kvtier.appliance.host.wiring import SPARE_CONNECTIONS
from kvtier.appliance.preflight import probes
from kvtier.appliance.server.ports import AppliedPolicy
from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.errors import PermissionDenied
from kvtier.tiers.block import Tier
from kvtier.tiers.memory import memfd

from ...waiting import until
from ..loops import DaemonThread

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"reload").digest(), GEOMETRY)
NUM_BLOCKS = 100  # of 64 KiB: 6.25 MiB, three extents and a bit
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(NUM_BLOCKS)]


class Scene:
    """A daemon with a policy file, and some blocks in it."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.file = folder / "policy.yaml"
        self.target = f"unix://{folder}/k.sock"
        self.policy: dict[str, Any] = {
            "listen": self.target,
            "observe": {"http": "off"},
            "compression": {"codec": "identity"},  # not something else in the middle of a test
            "tiers": {
                "hbm": {"capacity": "4MiB"},
                "dram": {"capacity": "16MiB", "extent": "2MiB"},
                "nvme": {"path": str(folder / "nvme"), "capacity": "16MiB", "segment": "2MiB"},
            },
            **sections,
        }
        self.nvme = folder / "nvme"
        self.write()
        self.thread = DaemonThread(Origin(self.file, {}).load())

    def text(self, **sections: Any) -> str:
        """Return the policy with other values in some sections."""
        changed: dict[str, Any] = yaml.safe_load(yaml.safe_dump(self.policy))
        for section, values in sections.items():
            for key, value in values.items():
                here = changed.setdefault(section, {})
                here[key] = {**here.get(key, {}), **value} if isinstance(value, dict) else value
        return yaml.safe_dump(changed)

    def write(self, **sections: Any) -> None:
        """Exchange the file."""
        new = self.file.with_suffix(".new")
        new.write_text(self.text(**sections))
        os.replace(new, self.file)

    def apply(self, text: str | None = None, **options: Any) -> AppliedPolicy:
        """Apply a policy, on the daemon's own loop."""
        return self.thread.wait(self.thread.daemon.reload.apply(text, "sent.yaml", **options))

    def capacity(self, tier: Tier) -> int:
        """Return the capacity that the books know."""
        books: dict[Tier, dict[str, int]] = self.thread.daemon.planner.statistics()["tiers"]
        return books[tier]["capacity_bytes"]

    def settle(self) -> None:
        """Wait until nothing is under way, and audit."""
        self.thread.wait(self.thread.daemon.appliance.settled())
        self.thread.wait(audit(self.thread.daemon))


async def audit(daemon: Any) -> None:
    assert daemon.check_integrity() == []


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    with made.thread:
        yield made
        made.settle()


def test_what_is_applied_holds_at_once(scene: Scene) -> None:
    daemon = scene.thread.daemon
    assert daemon.reload.status.generation == 1
    policy = {"eviction": "s3fifo", "prefetch": ""}
    text = scene.text(policy=policy, leases={"ttl": "5s"}, limits={"max_clients": 1})
    assert [change.key for change in scene.apply(text, is_dry_run=True).changes] == [
        "policy.eviction",
        "policy.prefetch",
        "leases.ttl",
        "limits.max_clients",
    ]
    assert (daemon.reload.status.generation, daemon.planner.core.options.lease_ttl_s) == (1, 30), "dry"
    assert scene.apply(text, generation=1).generation == 2
    assert (daemon.planner.core.options.lease_ttl_s, daemon.service.options.lease_ttl_s) == (5, 5)
    assert daemon.planner.core.choice.eviction == "s3fifo"
    assert daemon.planner.core.policies.prefetcher is None
    assert daemon.local is not None
    assert daemon.local.options.max_connections == 1 + SPARE_CONNECTIONS
    assert scene.apply(text).generation == 2, "nothing differs any more"


@pytest.mark.parametrize(
    ("sections", "reason", "words"),
    [
        (
            {"leases": {"ttl": "20m"}},
            "BAD_POLICY",
            r"sent\.yaml:\d+: leases\.ttl: 20m is longer than 10m, the longest lease",
        ),
        ({"policy": {"eviction": "lur"}}, "BAD_POLICY", "no policy 'lur'"),
        (
            {"policy": {"options": {"s3fifo": {"smal": 1}}, "eviction": "s3fifo"}},
            "BAD_POLICY",
            "policy: .*s3fifo",
        ),
        ({"policy": {"options": {"lru": {"x": 1}}}}, "BAD_POLICY", "'lru' has no option 'x'"),  # not in use
        ({"tiers": {"dram": {"extent": "4MiB"}}}, "NEEDS_RESTART", r"tiers\.dram\.extent \(2MiB -> 4MiB\)"),
        ({"tiers": {"nvme": {"path": "/elsewhere"}}}, "NEEDS_RESTART", r"tiers\.nvme\.path"),
        ({"policy": {"allowed_modules": ["os"], "eviction": "os:path"}}, "NEEDS_RESTART", "at the start"),
        ({"tiers": {"dram": {"capacity": "15TiB", "extent": "2MiB"}}}, "BAD_POLICY", "limit 16384"),
        ({"tiers": {"dram": {"capacity": "32GiB"}}}, "TIER_FULL", "are available; lower tiers"),
        (
            {"tiers": {"nvme": {"capacity": "32GiB"}}},
            "TIER_FULL",
            r"tiers\.nvme\.capacity: .* bytes are free",
        ),
    ],
)
def test_what_is_refused_changes_nothing(
    scene: Scene, sections: dict[str, Any], reason: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 9, 9)))
    if sections.get("tiers", {}).get("nvme", {}).get("capacity"):
        monkeypatch.setattr(type(scene.thread.daemon.assembly.store._io), "allocate", no_space)  # type: ignore[union-attr]
    before = scene.thread.daemon.settings
    files = sorted(scene.nvme.iterdir())
    sections = {"leases": {"ttl": "9s"}, **sections}  # something right beside it
    with pytest.raises(ApplianceError, match=words) as caught:
        scene.apply(scene.text(**sections))
    assert caught.value.reason == reason
    daemon = scene.thread.daemon
    assert daemon.settings is before
    assert daemon.planner.core.options.lease_ttl_s == 30
    assert sorted(scene.nvme.iterdir()) == files
    status = daemon.reload.status
    assert (status.generation, status.num_refused) == (1, 1)
    assert status.last_error == "", "the file is what runs"
    scene.apply(scene.text(leases={"ttl": "9s"}))
    assert (status.generation, daemon.planner.core.options.lease_ttl_s) == (2, 9)


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_two_administrators_do_not_undo_each_other(scene: Scene) -> None:
    scene.apply(scene.text(leases={"ttl": "9s"}), generation=1)
    with pytest.raises(ApplianceError, match="generation 1 is not in force any more, 2 is") as caught:
        scene.apply(scene.text(leases={"ttl": "8s"}), generation=1)
    assert caught.value.reason == "GENERATION_CONFLICT"


def test_tiers_shrink_and_grow_under_what_they_hold(scene: Scene) -> None:
    data = np.random.default_rng(1).integers(0, 256, NUM_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with Client(scene.target) as client:
        namespace = client.register(IDENTITY)
        assert client.put(namespace, NAMES, data).complete
        for sizes in ((2, 12), (16, 10), (4, 16)):
            dram, nvme = sizes
            tiers = {"dram": {"capacity": f"{dram}MiB"}, "nvme": {"capacity": f"{nvme}MiB"}}
            scene.apply(scene.text(tiers=tiers))
            scene.settle()
            assert (scene.capacity(Tier.DRAM), scene.capacity(Tier.NVME)) == (dram << 20, nvme << 20)
            assert not scene.thread.daemon.planner.resizing.is_active
            assert len(list(scene.nvme.glob("segment-*"))) == nvme // 2
            made = scene.thread.daemon.assembly.dram.reports()
            assert len(made) <= dram // 2
            report = client.get(namespace, NAMES)
            num_bytes = report.num_blocks * GEOMETRY.block_bytes
            np.testing.assert_array_equal(np.asarray(report.data)[:num_bytes], data[:num_bytes])
            if sizes == (2, 12):  # what left dram was spilled
                assert client.lookup(namespace, NAMES).num_blocks == NUM_BLOCKS


def test_a_tier_does_not_shrink_below_what_is_pinned(scene: Scene) -> None:
    data = np.zeros(NUM_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with Client(scene.target) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, NAMES, data)
        client.pin(namespace, NAMES[:40], 60.0)
        with pytest.raises(ApplianceError, match=r"tier dram cannot shrink .* are pinned; unpin first"):
            scene.apply(scene.text(tiers={"dram": {"capacity": "2MiB"}}))
        scene.apply(scene.text(tiers={"dram": {"capacity": "4MiB"}}))
        scene.settle()
        assert client.get(namespace, NAMES[:40]).num_blocks == 40


def test_the_file_is_read_when_it_is_another(scene: Scene) -> None:
    daemon = scene.thread.daemon
    scene.write(leases={"ttl": "9s"})
    scene.thread.wait(daemon.reload.file_changed())
    assert daemon.planner.core.options.lease_ttl_s == 9
    scene.apply(scene.text(leases={"ttl": "8s"}))
    scene.thread.wait(daemon.reload.file_changed())
    assert daemon.planner.core.options.lease_ttl_s == 8, "the file is as it was: the call stays in force"
    scene.thread.wait(daemon.reload.from_file())
    assert daemon.planner.core.options.lease_ttl_s == 9, "SIGHUP reads it whatever it says"
    scene.file.write_text("leases: {ttl: soon}")
    assert scene.thread.wait(daemon.reload.from_file()) is None
    assert "leases.ttl: 'soon' is not a duration" in daemon.reload.status.last_error
    scene.file.unlink()
    assert scene.thread.wait(daemon.reload.from_file()) is None
    assert "cannot be read" in daemon.reload.status.last_error
    assert daemon.planner.core.options.lease_ttl_s == 9, "the last good one stays"


def test_a_file_that_is_emptied_means_the_defaults_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("leases: {ttl: 9s}")
    overrides = (f"listen=unix://{tmp_path}/k.sock", "observe.http=off", "tiers.dram.capacity=64MiB")
    with DaemonThread(Origin(file, {}, overrides).load()) as thread:
        file.write_text("")
        thread.wait(thread.daemon.reload.from_file())
        assert thread.daemon.planner.core.options.lease_ttl_s == 30
    assert f"{file}: sets nothing; built-in defaults are used" in caplog.text


def test_reloads_under_load_fail_nobody_and_leak_nothing(tmp_path: Path) -> None:
    """`python -m bench.reload` does this 200 times."""
    outcome = play(tmp_path, num_reloads=8, seed=20, num_clients=3)
    print((tmp_path / "daemon.log").read_text()[-2000:])
    assert outcome.failures == []
    assert outcome.num_applied + outcome.num_refused == 8
    assert sum(tally.num_blocks_read for tally in outcome.tallies) > 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"members": ["uid:1"]}, "given"),
        ([1, 2], "[1, 2]"),
        (["dns:*.acme.svc"] * 5, "5 entries"),
        (None, "none"),
        ("64MiB", "64MiB"),
        (0.9, "0.9"),
    ],
)
def test_what_the_log_says_of_a_change(value: object, words: str) -> None:
    assert reload_module.brief(value) == words


def test_a_tenant_that_leaves_the_policy_is_refused_over_the_connection_that_it_has(tmp_path: Path) -> None:
    """Engines keep theirs for days. A policy that leaves the tenant what it was closes none."""
    scene = Scene(tmp_path, tenants={"acme": {"members": [f"uid:{os.getuid()}"]}})
    payload = np.ones(IDENTITY.geometry.block_bytes, np.uint8)
    with scene.thread, Client(scene.target) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, NAMES[:1], payload)
        local = scene.thread.daemon.local
        assert local is not None
        scene.apply(scene.text(leases={"ttl": "9s"}))
        assert client.get(namespace, NAMES[:1]).num_blocks == 1
        assert "tenant changed" not in local.counters
        scene.policy["tenants"] = {"other": {"members": ["uid:12345"]}}
        scene.apply(scene.text())
        assert local.counters["tenant changed"] == 1
        with pytest.raises(PermissionDenied, match="NO_TENANT"):  # what it has mapped it could read until now
            client.put(namespace, NAMES[1:2], payload)
        for call in (client.get, client.lookup):
            with pytest.raises(PermissionDenied, match="NO_TENANT"):
                call(namespace, NAMES[:1])


def test_a_setting_that_needs_a_restart_holds_back_no_revocation(tmp_path: Path) -> None:
    """The file said for days that a tenant has left, and was refused for another line."""
    me, here = f"uid:{os.getuid()}", {"members": ["uid:4711"]}
    scene = Scene(tmp_path, tenants={"acme": {"members": [me, "uid:12345"]}, "here": here})
    payload = np.ones(IDENTITY.geometry.block_bytes, np.uint8)
    with scene.thread, Client(scene.target) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, NAMES[:1], payload)
        daemon = scene.thread.daemon
        status = daemon.reload.status
        scene.policy["tenants"] = {"here": {"members": ["uid:4711", me]}}
        scene.policy["reflection"] = False
        scene.policy["leases"] = {"ttl": "9s"}
        for options in ({"is_dry_run": True}, {}):
            with pytest.raises(ApplianceError, match=r"need a restart: reflection \(True -> False\)$"):
                scene.apply(scene.text(), **options)
        assert (status.last_error, client.get(namespace, NAMES[:1]).num_blocks) == ("", 1), "all or nothing"
        scene.write()
        scene.thread.wait(daemon.reload.file_changed())
        until(lambda: "are refused now" in status.last_error)
        with pytest.raises(PermissionDenied, match="NO_TENANT"):  # what it has mapped it could read until now
            client.put(namespace, NAMES[1:2], payload)
        for call in (client.get, client.lookup):
            with pytest.raises(PermissionDenied, match="NO_TENANT"):
                call(namespace, NAMES[:1])
        assert daemon.settings.tenants["here"].members == ["uid:4711"], "nothing is granted"
        scene.policy["tenants"] = {"acme": {"members": [me]}, "here": here}  # that was a slip
        scene.write()
        scene.thread.wait(daemon.reload.file_changed())
        assert client.get(client.register(IDENTITY), NAMES[:1]).num_blocks == 1, "let in again"
        assert daemon.settings.tenants["acme"].members == [me]
        scene.policy["tenants"] = {"here": {"members": ["uid:4711", me]}}
        scene.write()
        scene.thread.wait(daemon.reload.file_changed())
        assert daemon.planner.core.options.lease_ttl_s == 30
        assert "restart: reflection" in status.last_error
        del scene.policy["reflection"]
        scene.apply(scene.text(leases={"ttl": "8s"}))
        assert "restart: reflection" in status.last_error, "the file is still not what runs"
        scene.write()
        assert scene.apply().generation == status.generation
        assert (status.last_error, daemon.planner.core.options.lease_ttl_s) == ("", 9)
        assert client.put(namespace, NAMES[1:2], payload).complete


def test_a_disk_that_hangs_holds_back_no_revocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run looks at the host, which a file that revokes waited for; so it did for its own look."""
    began, may_go_on = threading.Event(), threading.Event()

    def hang(_: Path) -> int:
        began.set()
        may_go_on.wait(60)
        return 0

    scene = Scene(tmp_path, tenants={"acme": {"members": [f"uid:{os.getuid()}", "uid:12345"]}})
    with scene.thread:
        daemon = scene.thread.daemon
        monkeypatch.setattr(probes, "write_errno", hang)
        scene.policy["reflection"] = False
        dry_run = scene.thread.call(
            lambda: asyncio.ensure_future(daemon.reload.apply(scene.text(), "sent.yaml", is_dry_run=True))
        )
        assert began.wait(60)
        scene.policy["tenants"]["acme"]["members"] = ["uid:12345"]
        scene.write()
        assert scene.thread.wait(asyncio.wait_for(daemon.reload.from_file(), 30)) is None
        assert daemon.settings.tenants["acme"].members == ["uid:12345"]
        may_go_on.set()
        until(dry_run.done)
        assert "need a restart: reflection" in str(dry_run.exception())


def test_a_dry_run_of_the_file_leaves_it_to_be_read(tmp_path: Path) -> None:
    """The watcher took a text that a dry run had read for one that runs."""
    scene = Scene(tmp_path)
    with scene.thread:
        daemon = scene.thread.daemon
        scene.policy["leases"] = {"ttl": "9s"}
        scene.write()
        scene.apply(is_dry_run=True)
        scene.thread.wait(daemon.reload.file_changed())
        assert daemon.planner.core.options.lease_ttl_s == 9


def test_a_stop_does_not_wait_for_memory_that_a_reload_added(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited until all of it was made, seconds per gigabyte, and so did `kvtier restart`."""
    daemon, began, may_go_on = scene.thread.daemon, threading.Event(), threading.Event()
    made: list[int] = []
    assert daemon._prefaulting is not None
    until(daemon._prefaulting.done)

    def populate(descriptor: int, *_: object) -> None:
        made.append(descriptor)
        began.set()
        may_go_on.wait(60)

    monkeypatch.setattr(memfd, "populate", populate)
    scene.apply(scene.text(tiers={"dram": {"capacity": "64MiB"}}))
    assert began.wait(60)
    stopping = scene.thread.call(lambda: asyncio.ensure_future(daemon.stop()))
    until(lambda: daemon.reload._is_closed)
    may_go_on.set()
    until(stopping.done)
    assert len(made) == 1


def test_a_socket_file_that_is_gone_fails_no_reload(scene: Scene) -> None:
    """The reload raised half way, before it ended what is revoked."""
    Path(scene.target.removeprefix("unix://")).unlink()
    Path(f"{scene.target.removeprefix('unix://')}.local").unlink()
    assert scene.apply(scene.text(leases={"ttl": "5s"})).generation == 2
    assert scene.thread.daemon.reload.status.num_applied == 1
