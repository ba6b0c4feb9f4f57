"""What runs kvtier without Kubernetes: the compose file and the systemd unit."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvtier.appliance.cli.app import cli
from kvtier.appliance.config import Settings
from tests.deploy.test_image import instructions

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = DEPLOY / "compose"
UNIT = DEPLOY / "systemd" / "kvtier.service"
MOST_EXPOSED = 2.0  # of 10, by systemd's own measure


def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def unit() -> dict[str, list[str]]:
    """Return the unit's settings, by name; sections do not matter here."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("policy.yaml")), ids=lambda path: path.parent.name)
def test_every_policy_is_one_and_every_runtime_that_is_root_is_no_administrator(path: Path) -> None:
    settings = Settings.load(path, {})
    assert settings.listen == ["unix:///run/kvtier/kvtier.sock"]
    if path.parent.name == "compose":
        assert settings.access.admin == ["uid:10001"]


def test_the_daemon_in_compose_may_do_what_the_pod_may() -> None:
    service = compose()["services"]["kvtier"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [service["user"]] == [rest for word, rest in instructions() if word == "USER"]
    for other in compose()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in other["ports"])
        assert ":" in other["image"] or other["image"] == "kvtier"


def test_what_compose_mounts_is_there() -> None:
    made = compose()["volumes"]
    for service in compose()["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in made or (COMPOSE / source).exists(), volume
        if "build" in service:
            assert (COMPOSE / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_prometheus_asks_the_daemon_where_it_listens_and_grafana_prometheus() -> None:
    address = compose()["services"]["kvtier"]["networks"]["inside"]["ipv4_address"]
    port = Settings.load(COMPOSE / "policy.yaml", {}).observe.http.rpartition(":")[2]
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"{address}:{port}"]
    provisioning = COMPOSE / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    dashboard = json.loads((DEPLOY.parent / "helm" / "kvtier" / "files" / "dashboard.json").read_text())
    asked = set(
        re.findall(
            r'"uid": "([^"]*)", "type": "prometheus"|"type": "prometheus", "uid": "([^"]*)"',
            json.dumps(dashboard),
        )
    )
    assert all(uid.startswith("$") or uid == source["uid"] for pair in asked for uid in pair if uid)


def test_the_unit_runs_commands_that_there_are() -> None:
    said = unit()
    for name in ("ExecStartPre", "ExecStart", "ExecStop"):
        [line] = said[name]
        program, *arguments = shlex.split(line.lstrip("-"))
        assert program == "/opt/kvtier/bin/kvtier"
        shown = CliRunner().invoke(cli, [*(a for a in arguments if not a.startswith(("-", "/"))), "--help"])
        if arguments[0] == "policy":
            shown = CliRunner().invoke(cli, ["policy", "validate", "--help"])
        if arguments[0] == "drain":
            shown = CliRunner().invoke(cli, ["drain", "--help"])
        assert shown.exit_code == 0, shown.output
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert option in shown.output
    grace_s = int(re.search(r"--grace (\d+)s", said["ExecStop"][0])[1])  # type: ignore[index]
    assert int(said["TimeoutStopSec"][0]) >= grace_s + 30


def test_the_units_folders_are_those_of_its_policy() -> None:
    said, settings = unit(), Settings.load(UNIT.with_name("policy.yaml"), {})
    assert settings.listen == [said["Environment"][0].removeprefix("KVTIER_TARGET=")]
    assert settings.listen[0].startswith(f"unix:///run/{said['RuntimeDirectory'][0]}/")
    assert settings.tiers.nvme is not None
    assert str(settings.tiers.nvme.path).startswith(f"/var/lib/{said['StateDirectory'][0]}/")
    assert said["RequiresMountsFor"] == [f"/var/lib/{said['StateDirectory'][0]}"]
    needed = settings.tiers.dram.num_extents + settings.tiers.nvme.num_segments
    assert needed + 4 * settings.limits.max_clients < int(said["LimitNOFILE"][0])


def test_systemd_finds_it_hardened() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={int(MOST_EXPOSED * 10)}",
        str(UNIT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd does not look at files")
    assert done.returncode == 0, done.stdout[-400:] + done.stderr


def test_systemd_understands_every_line(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/kvtier/bin/kvtier", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    about_us = [line for line in done.stderr.splitlines() if str(copy) in line or UNIT.name in line]
    assert about_us == []
