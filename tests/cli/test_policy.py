"""`kvtier policy`: what each verb prints, and what it exits with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvtier.appliance.config import Origin
from kvtier.appliance.errors import StartError

from ..appliance.loops import DaemonThread
from .conftest import run


@pytest.fixture
def policy(tmp_path: Path, target: str) -> Path:
    """A right policy, for a small daemon at `target`."""
    file = tmp_path / "policy.yaml"
    tiers = {"dram": {"capacity": "8MiB", "extent": "2MiB"}}
    file.write_text(yaml.safe_dump({"listen": target, "tiers": tiers, "observe": {"http": "off"}}))
    return file


@pytest.fixture
def daemon(policy: Path) -> Iterator[DaemonThread]:
    """A daemon that has this policy."""
    with DaemonThread(Origin(policy, {}).load()) as running:
        yield running


def test_validate_says_nothing_or_everything(policy: Path, tmp_path: Path) -> None:
    result = run("policy", "validate", str(policy))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("leases:\n  ttl: 20m\nlimits:\n  max_client: 1\n")
    result = run("policy", "validate", str(wrong))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{wrong}:2: leases.ttl: 20m is longer than 10m, the longest lease" in result.stderr
    answer = json.loads(run("policy", "validate", str(wrong), "--json").stdout)
    assert not answer["valid"]
    assert {problem["path"] for problem in answer["problems"]} == {"leases.ttl", "limits.max_client"}
    assert answer["problems"][0]["source"].startswith(f"{wrong}:")
    assert run("policy", "validate", str(tmp_path / "absent.yaml")).exit_code == 2


def test_validate_builds_the_policies(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("policy: {eviction: urgency, options: {urgency: {objektive: seconds}}}\n")
    result = run("policy", "validate", str(wrong))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{wrong}:1: policy: policy 'urgency' has one option, objective" in result.stderr


def test_a_daemon_says_why_its_policies_cannot_be_built(policy: Path) -> None:
    policy.write_text(policy.read_text() + "policy: {eviction: clairvoyant}\n")
    with pytest.raises(StartError, match="policy: policy 'clairvoyant' works in `kvtier replay` only"):
        DaemonThread(Origin(policy, {}).load()).__enter__()


def test_show_names_the_source_of_every_value(policy: Path) -> None:
    arguments = ("policy", "show", "--policy", str(policy), "--set", "leases.ttl=9s", "--json")
    settings = json.loads(run(*arguments).stdout)["settings"]
    assert settings["leases.ttl"] == {"value": "9s", "source": "--set leases.ttl"}
    assert settings["tiers.dram.capacity"]["source"].startswith(f"{policy}:")
    assert settings["limits.max_pinned"] == {"value": "50%", "source": "default"}
    changed = json.loads(run(*arguments, "--changed").stdout)["settings"]
    assert "limits.max_pinned" not in changed
    assert "leases.ttl" in changed
    assert "limits.max_pinned" in run("policy", "show", "--policy", str(policy)).stdout
    named = run("policy", "show", str(policy)).stdout
    assert named == run("policy", "show", "--policy", str(policy)).stdout
    for other in (("--policy", str(policy)), ("--running",)):
        twice = run("policy", "show", str(policy), *other)
        assert (twice.exit_code, "name one" in twice.stderr) == (2, True)


def test_diff_says_what_needs_a_restart(policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(policy.read_text() + "leases: {ttl: 9s}\nreflection: false\n")
    text = run("policy", "diff", str(policy), str(other)).stdout
    assert "leases.ttl: 30s → 9s\n" in text
    assert "reflection: true → false   (needs a restart)" in text
    changes = json.loads(run("policy", "diff", str(policy), str(other), "--json").stdout)["changes"]
    assert changes["reflection"] == {"was": True, "becomes": False, "needs_restart": True}
    assert "no setting differs" in run("policy", "diff", str(policy), str(policy)).stdout


def test_schema_is_json() -> None:
    assert json.loads(run("policy", "schema").stdout)["title"] == "kvtier policy"


def test_apply_and_show_what_is_running(
    daemon: DaemonThread, policy: Path, target: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(policy.read_text() + "leases: {ttl: 9s}\n")
    answer = json.loads(run("policy", "apply", str(other), "--dry-run", "--json", target=target).stdout)
    assert answer["changes"] == {"leases.ttl": {"was": "30s", "becomes": "9s", "needs_restart": False}}
    assert (answer["generation"], daemon.daemon.planner.core.options.lease_ttl_s) == (1, 30)
    text = run("policy", "apply", str(other), "--generation", "1", target=target).stdout
    assert "leases.ttl: 30s → 9s" in text
    assert "in force is generation 2" in text
    running = json.loads(run("policy", "show", "--running", "--changed", "--json", target=target).stdout)
    assert running["generation"] == 2
    ttl = running["settings"]["leases.ttl"]
    assert (ttl["value"], ttl["source"].startswith(f"{other}:")) == ("9s", True)
    assert "in force is generation 3" in run("policy", "apply", target=target).stdout, "the daemon's own file"
    other.write_text(policy.read_text() + "leases: {ttl: soon}\n")
    result = run("policy", "apply", str(other), target=target)
    assert result.exit_code == 2
    assert f"BAD_POLICY: {other}:" in result.stderr
    assert "refused" not in run("policy", "show", "--running", target=target).stdout, "the file is what runs"
    policy.write_text(policy.read_text() + "reflection: false\n")
    result = run("policy", "apply", "--dry-run", target=target)
    assert (result.exit_code, "need a restart: reflection" in result.stderr) == (1, True)
    assert run("policy", "apply", target=target).exit_code == 1
    assert "the policy file is refused" in " ".join(run("status", target=target).stdout.split())
    assert "the policy file has been refused for" in run("policy", "show", "--running", target=target).stdout
    assert "runs with an earlier policy, the file is refused" in run("doctor", target=target).stdout
    result = run("policy", "apply", str(policy), "--generation", "1", target=target)
    assert (result.exit_code, "GENERATION_CONFLICT" in result.stderr) == (1, True)
