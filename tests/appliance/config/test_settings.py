"""Settings: read from every source, checked across fields, and refused with the place and the fix."""

from dataclasses import fields
from pathlib import Path

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
