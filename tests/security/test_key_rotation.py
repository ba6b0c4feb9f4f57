"""Another master key for a real daemon: while it runs, at a start, and when the file is a mistake."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvtier.appliance.config import Loaded, Origin
from kvtier.appliance.errors import ApplianceError, StartError
from kvtier.appliance.observability.web import exposition
from kvtier.tiers.encryption.master_keys import key_id
from kvtier.v1 import admin_pb2 as pb

from .test_erase import NAMES, Served, settings_in

OLD, NEW = os.urandom(32), os.urandom(32)
OFF = {"http": "off"}


def write(folder: Path, *keys: bytes) -> None:
    """Exchange the file of master keys, as an administrator does or the kubelet."""
    new = folder / "master.key.new"
    new.touch(0o600)
    new.write_text("".join(f"{key.hex()}\n" for key in keys))
    new.rename(folder / "master.key")


def loaded(folder: Path) -> Loaded:
    """Return the settings of an encrypting daemon, from a file that can be read again."""
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(settings_in(folder, observe=OFF).canonical()))
    return Origin(path, {}).load()


@contextmanager
def unwatched(source: Loaded) -> Iterator[Served]:
    """A daemon that looks at its files when it is told to, and not once a second as well."""
    with Served(source.settings, source) as served:
        served.running.wait(_close_eyes(served.running.daemon))
        yield served


async def _close_eyes(daemon: Any) -> None:
    assert len(daemon._watching) == 2, "the policy and the master keys"
    await daemon._watching.stop()


def uses(served: Served) -> list[tuple[str, bool, int]]:
    keys = served.admin.GetStatus(pb.GetStatusRequest()).encryption.master_keys
    return [(key.id, key.is_current, key.num_wrapped) for key in keys]


def gauge(served: Served, name: str) -> dict[str, float]:
    text = served.running.wait(_exposition(served.running.daemon)).decode()
    return {
        sample.labels.get("master_key", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def _exposition(daemon: Any) -> bytes:
    return exposition(daemon.observability.view)


def by_reload(served: Served) -> None:
    served.running.wait(served.running.daemon.reload.from_file())


def by_watch(served: Served) -> None:
    rotation = served.running.daemon.rotation
    assert rotation is not None
    served.running.wait(rotation.use(rotation.read()))


@pytest.mark.parametrize("notice", [by_reload, by_watch])
def test_a_change_of_master_key_while_blocks_are_served(
    tmp_path: Path, notice: Callable[[Served], None]
) -> None:
    write(tmp_path, OLD)
    source = loaded(tmp_path)
    with unwatched(source) as served:
        data = served.put(NAMES)
        served.push_out()
        assert uses(served) == [(key_id(OLD), True, 1)]
        write(tmp_path, NEW, OLD)
        served.running.wait(served.running.daemon.reload.apply(is_dry_run=True))
        assert uses(served) == [(key_id(OLD), True, 1)], "dry"
        notice(served)
        assert uses(served) == [(key_id(NEW), True, 1), (key_id(OLD), False, 0)]
        assert gauge(served, "kvtier_master_key_wraps") == {key_id(NEW): 1, key_id(OLD): 0}
        [row] = served.admin.ListTenants(pb.ListTenantsRequest()).tenants
        assert (row.has_key, row.master_key) == (True, key_id(NEW))
        write(tmp_path, NEW)
        notice(served)
        np.testing.assert_array_equal(served.client.get(served.namespace, NAMES).data, data)
    with unwatched(source) as served:
        np.testing.assert_array_equal(served.client.get(served.namespace, NAMES).data, data)
        assert uses(served) == [(key_id(NEW), True, 1)]


def test_a_file_without_a_needed_key_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    """By a reload as a whole, by the watch with a word, by a start; and then it is mended."""
    write(tmp_path, OLD)
    source = loaded(tmp_path)
    with unwatched(source) as served:
        data = served.put(NAMES)
        served.push_out()
        reload = served.running.daemon.reload
        text = yaml.safe_dump(settings_in(tmp_path, observe=OFF, leases={"ttl": "17s"}).canonical())
        write(tmp_path, NEW)
        for is_dry_run in (True, False):
            with pytest.raises(ApplianceError, match=f"another master key, {key_id(OLD)}.*put its line back"):
                served.running.wait(reload.apply(text, is_dry_run=is_dry_run))
            said = served.admin.GetStatus(pb.GetStatusRequest()).encryption.last_error
            assert (key_id(OLD) in said) is not is_dry_run
        assert (reload.status.generation, reload.status.num_refused) == (1, 1)
        assert gauge(served, "kvtier_master_key_file_refused") == {"": 1}
        by_watch(served)
        assert uses(served) == [(key_id(OLD), True, 1)], "the keys read before still hold"
        assert served.num_found() == len(NAMES)
    with (
        pytest.raises(StartError, match=f"{key_id(OLD)}.*put its line back"),
        unwatched(source),
    ):
        pass
    write(tmp_path, NEW, OLD)
    with unwatched(source) as served:
        np.testing.assert_array_equal(served.client.get(served.namespace, NAMES).data, data)
        assert uses(served) == [(key_id(NEW), True, 1), (key_id(OLD), False, 0)]
        (tmp_path / "master.key").unlink()
        by_watch(served)
        assert gauge(served, "kvtier_master_key_file_refused") == {"": 1}
        write(tmp_path, NEW)
        by_reload(served)
        assert gauge(served, "kvtier_master_key_file_refused") == {"": 0}


def test_a_daemon_without_a_policy_file_takes_a_key_at_sighup(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    with Served(settings_in(tmp_path, observe=OFF)) as served:
        served.put(NAMES)
        served.push_out()
        write(tmp_path, NEW, OLD)
        by_reload(served)
        assert uses(served)[0] == (key_id(NEW), True, 1)


def test_a_file_that_the_group_may_read_must_be_a_mounted_secret(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    (tmp_path / "master.key").chmod(0o440)
    settings = settings_in(tmp_path, observe=OFF)
    with pytest.raises(StartError, match="chmod 600"), Served(settings):
        pass
    (tmp_path / "..data").mkdir()
    (tmp_path / "master.key").rename(tmp_path / "..data/master.key")
    (tmp_path / "master.key").symlink_to("..data/master.key")
    with Served(settings) as served:
        served.put(NAMES)
        assert uses(served) == [(key_id(OLD), True, 0)]


def test_without_encryption_there_is_nothing_to_say(tmp_path: Path) -> None:
    with Served(settings_in(tmp_path, is_encrypted=False, observe=OFF)) as served:
        assert not served.admin.GetStatus(pb.GetStatusRequest()).HasField("encryption")
        assert gauge(served, "kvtier_master_key_wraps") == {}
        assert gauge(served, "kvtier_master_key_file_refused") == {"": 0}
