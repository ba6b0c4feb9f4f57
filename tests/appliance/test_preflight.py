"""One table of checks for start, reload and `kvtier policy validate`: all of them refuse what is wrong."""

import datetime
import json
import re
import resource
import time
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.appliance.config import Origin, Settings
from kvtier.appliance.errors import ApplianceError, StartError
from kvtier.appliance.preflight import probes, table
from kvtier.appliance.preflight.certificates import gather_tls
from kvtier.appliance.preflight.facts import Facts
from kvtier.appliance.preflight.table import Scope
from kvtier.appliance.preflight.verdicts import Check, CheckVerdict
from kvtier.appliance.security.tokens import hash_of

from ..cli.conftest import run
from ..security import certificates
from ..security.certificates import Authority, write_server_files
from .conftest import small_settings
from .loops import DaemonThread

MIB = 1 << 20


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """The section access.tls of files that are right."""
    folder = tmp_path / "tls"
    folder.mkdir()
    files = write_server_files(folder, Authority("ops"))
    Path(files["key"]).chmod(0o600)
    return files


def settings_of(folder: Path, sections: dict[str, Any]) -> Settings:
    return small_settings(folder, **{"observe": {"http": "off"}, **sections})


def found(folder: Path, sections: dict[str, Any]) -> list[Check]:
    """Return what is not ok, host aside."""
    settings = settings_of(folder, sections)
    checks = table.examine(Facts(settings), settings, [Scope.SETTINGS, Scope.FILES])
    return [check for check in checks if check.verdict is not CheckVerdict.OK]


# ------------------------------------------------------------------------- mistakes in certificates


def missing_key(tls: dict[str, str]) -> None:
    Path(tls["key"]).unlink()


def no_pem(tls: dict[str, str]) -> None:
    Path(tls["client_ca"]).write_text("soon\n")


def damaged(tls: dict[str, str]) -> None:
    Path(tls["client_ca"]).write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def another_key(tls: dict[str, str]) -> None:
    Path(tls["key"]).write_bytes(Authority("other").sign("dns:x").key)


def swapped(tls: dict[str, str]) -> None:
    tls["certificate"], tls["key"] = tls["key"], tls["certificate"]


def public_key(tls: dict[str, str]) -> None:
    Path(tls["key"]).chmod(0o644)


def no_authority(tls: dict[str, str]) -> None:
    tls["client_ca"] = tls["certificate"]


CERTIFICATE_CASES = {
    "missing key": (missing_key, "key", CheckVerdict.FAIL, "key.pem on this machine: No such file"),
    "no PEM": (no_pem, "client_ca", CheckVerdict.FAIL, "holds nothing in PEM format"),
    "damaged": (damaged, "client_ca", CheckVerdict.FAIL, "cannot be used"),
    "another key": (another_key, "key", CheckVerdict.FAIL, "is not the key of"),
    "swapped": (swapped, "certificate", CheckVerdict.FAIL, "cannot be used"),
    "public key": (public_key, "key", CheckVerdict.WARN, "every user of this machine can read the key"),
    "no authority": (no_authority, "client_ca", CheckVerdict.WARN, "holds no certificate of an authority"),
}


@pytest.mark.parametrize("case", CERTIFICATE_CASES)
def test_mistakes_in_certificates_are_found(case: str, tmp_path: Path, tls: dict[str, str]) -> None:
    spoil, key, verdict, words = CERTIFICATE_CASES[case]
    spoil(tls)
    checks = found(tmp_path, {"access": {"tls": tls}})
    worst = [c for c in checks if c.verdict is verdict and words in c.detail]
    assert [c.setting for c in worst] == [f"access.tls.{key}"]
    assert all(c.fix for c in checks)


@pytest.mark.parametrize(
    ("shift_days", "length_days", "words"),
    [
        (-2, 1, "clients refuse the certificate: certificate has expired"),
        (2, 1, "clients refuse the certificate: certificate is not yet valid"),
        (0, 7, "ends on"),
        (0, 90, ""),
    ],
)
def test_a_certificate_that_ends_is_told_in_time(
    shift_days: int, length_days: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_DAY", datetime.timedelta(days=length_days))
    authority = Authority("ops")
    tls = write_server_files(tmp_path, authority)
    pair = authority.sign("dns:localhost", shift=datetime.timedelta(days=shift_days))
    Path(tls["certificate"]).write_bytes(pair.certificate)
    Path(tls["key"]).write_bytes(pair.key)
    Path(tls["key"]).chmod(0o600)
    checks = found(tmp_path, {"access": {"tls": tls}})
    assert all(check.verdict is CheckVerdict.WARN for check in checks)
    details = [check.detail for check in checks if check.setting == "access.tls.certificate"]
    assert [words in detail for detail in details] == ([True] if words else [])
    read = gather_tls(Settings.model_validate({"access": {"tls": tls}}).access.tls)
    days = {key: (end - time.time()) / 86400 for key, end in read.ends.items()} if read is not None else {}
    assert days == pytest.approx({"certificate": shift_days + length_days, "client_ca": length_days}, abs=0.1)


# ---------------------------------------------------------------------------------- tokens, quotas


def test_mistakes_in_the_token_file_are_found(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    access = {"tokens": str(file), "admin": ["token:ops"]}
    (missing,) = found(tmp_path, {"access": access})
    assert (missing.verdict, missing.setting) == (CheckVerdict.FAIL, "access.tokens")
    assert "on this machine" in missing.detail
    file.write_text("ops nonsense\n")
    file.chmod(0o600)
    (wrong,) = found(tmp_path, {"access": access})
    assert (wrong.verdict, "line 1" in wrong.detail) == (CheckVerdict.FAIL, True)
    file.write_text(f"prometheus {hash_of('x')}\n")
    (unknown,) = found(tmp_path, {"access": access})
    assert (unknown.verdict, unknown.setting) == (CheckVerdict.WARN, "access.admin")
    file.write_text(f"ops {hash_of('x')}\n")
    assert found(tmp_path, {"access": access}) == []
    file.chmod(0o666)
    assert [check.fix for check in found(tmp_path, {"access": access})] == [
        f"chmod go-w {file}",
        f"chmod o= {file}",
    ]


def tenants(**quotas: dict[str, str]) -> dict[str, Any]:
    """Return tenants of 8 MiB of dram in extents of 2 MiB."""
    people = {
        name: {"members": [f"uid:{n}"], "quota": quota} for n, (name, quota) in enumerate(quotas.items(), 1)
    }
    return {"tenants": people}


QUOTA_CASES = {
    "more than there is": (
        tenants(a={"dram": "9MiB"}),
        "tenants.a.quota.dram",
        "more than the tier has, 8MiB",
    ),
    "together": (tenants(a={"dram": "6MiB"}, b={"dram": "4MiB"}), "tiers.dram.capacity", "10MiB together"),
    "less than an extent": (tenants(a={"dram": "1MiB"}), "tenants.a.quota.dram", "less than one extent"),
    "of a tier that is not there": (tenants(a={"nvme": "1GiB"}), "tenants.a.quota.nvme", "the tier has, 0B"),
    "too many": (
        tenants(**{f"t{n}": {} for n in range(5)}),
        "tiers.dram.capacity",
        "4 extents for 5 tenants",
    ),
}


@pytest.mark.parametrize("case", QUOTA_CASES)
def test_quotas_that_cannot_be_are_told(case: str, tmp_path: Path) -> None:
    sections, setting, words = QUOTA_CASES[case]
    (check,) = found(tmp_path, sections)
    assert (check.verdict, check.setting) == (CheckVerdict.WARN, setting)
    assert words in check.detail


def test_quotas_that_fit_are_not_told(tmp_path: Path) -> None:
    assert found(tmp_path, tenants(a={"dram": "4MiB"}, b={"dram": "4MiB"})) == []


@pytest.mark.parametrize(
    ("capacity", "share", "is_told"),
    [
        ("256MiB", "eager", True),
        ("256MiB", "worth", True),
        ("256MiB", "off", False),
        ("1GiB", "eager", False),
    ],
)
def test_a_dram_too_small_for_exports_is_told(
    capacity: str, share: str, is_told: bool, tmp_path: Path
) -> None:
    object_store = {"url": f"file://{tmp_path}", "share": share}
    checks = found(tmp_path, {"tiers": {"dram": {"capacity": capacity}}, "object": object_store})
    told = [check for check in checks if check.name == "object store"]
    assert [check.verdict for check in told] == [CheckVerdict.WARN] * is_told
    assert all("512MiB or more" in check.fix for check in told)


# ------------------------------------------------------------------------------------- libraries


@pytest.mark.parametrize(
    ("sections", "module", "verdict", "words"),
    [
        ({}, "numba", None, ""),
        (
            {"compression": {"codec": "auto"}, "listen": ["127.0.0.1:0"]},
            "numba",
            CheckVerdict.WARN,
            "[codecs]",
        ),
        ({"compression": {"codec": "planes"}, "listen": ["127.0.0.1:0"]}, "numba", None, ""),
        ({"observe": {"http": "off", "traces": "otlp"}}, "opentelemetry.sdk", CheckVerdict.FAIL, "[otel]"),
        (
            {"observe": {"http": "off", "kv_events": "tcp://127.0.0.1:1"}},
            "zmq",
            CheckVerdict.FAIL,
            "[events]",
        ),
    ],
)
def test_libraries_that_the_settings_need(
    sections: dict[str, Any], module: str, verdict: CheckVerdict | None, words: str, tmp_path: Path
) -> None:
    plain = small_settings(tmp_path).model_dump(by_alias=True)
    settings = Settings.model_validate({**plain, "access": {"insecure": True}, **sections})
    facts = Facts(settings, missing_modules=frozenset({module}))
    checks = [c for c in table.examine(facts, settings, [Scope.HOST]) if c.name == "libraries"]
    assert [check.verdict for check in checks] == ([verdict] if verdict else [])
    assert all(words in check.fix for check in checks)


# -------------------------------------------------------------------- who refuses what is found


def write(file: Path, sections: dict[str, Any]) -> Path:
    """Write a policy of a small daemon."""
    dumped = small_settings(file.parent).model_dump(by_alias=True, mode="json")
    kept = {key: dumped[key] for key in ("listen", "tiers")}
    file.write_text(yaml.safe_dump({**kept, "observe": {"http": "off"}, **sections}))
    return file


@pytest.mark.parametrize("version", [None, "1.4.0"])
def test_a_host_that_is_to_push_without_nixl_does_not_start(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", installed)
    sections: dict[str, Any] = {"peers": {"hosts": ["10.0.0.1:7070"], "transport": "nixl"}}
    sections |= {"listen": [f"unix://{tmp_path}/k.sock", "127.0.0.1:7070"], "access": {"insecure": True}}
    with pytest.raises(StartError, match="pip install --no-deps nixl-cu12==") as refused:
        table.require(settings_of(tmp_path, sections))
    assert str(refused.value).count("peers.transport: ") == 1
    assert ("1.4.0 is not supported" if version else "is missing") in str(refused.value)


def test_start_and_validate_refuse_the_same_certificates(tmp_path: Path, tls: dict[str, str]) -> None:
    Path(tls["key"]).unlink()
    policy = write(tmp_path / "policy.yaml", {"access": {"tls": tls}})
    with pytest.raises(StartError, match=r"access\.tls\.key: cannot read .*key\.pem on this machine"):
        DaemonThread(Origin(policy, {}).load()).__enter__()
    result = run("policy", "validate", str(policy))
    assert (result.exit_code, result.stdout) == (1, "")
    line = next(n for n, text in enumerate(policy.read_text().splitlines(), 1) if text.startswith("    key:"))
    assert (
        f"Error: {policy}:{line}: access.tls.key: cannot read {tls['key']} on this machine" in result.stderr
    )
    answer = json.loads(run("policy", "validate", "--json", str(policy)).stdout)
    assert (answer["valid"], [p["path"] for p in answer["problems"]]) == (False, ["access.tls.key"])
    elsewhere = run("policy", "validate", "--no-files", str(policy))
    assert (elsewhere.exit_code, elsewhere.stderr) == (0, "")


def test_validate_warns_and_says_yes(tmp_path: Path) -> None:
    policy = write(tmp_path / "policy.yaml", tenants(a={"dram": "9MiB"}))
    result = run("policy", "validate", str(policy))
    assert result.exit_code == 0
    assert f"Warning: {policy}:" in result.stderr
    assert "tenants.a.quota.dram: 9MiB is more than the tier has" in result.stderr


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, tls: dict[str, str]) -> None:
    Path(tls["key"]).unlink()
    access = {"tls": tls, "tokens": str(tmp_path / "absent")}
    options = {"lru": {"surprise": 1}}
    policy = write(
        tmp_path / "policy.yaml", {"access": access, "policy": {"eviction": "lru", "options": options}}
    )
    with pytest.raises(StartError) as refusal:
        DaemonThread(Origin(policy, {}).load()).__enter__()
    lines = str(refusal.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "policy",
        "access.tls.key",
        "access.tokens",
    ]
    assert run("policy", "validate", str(policy)).exit_code == 2, "the file is wrong everywhere"


def test_a_reload_makes_the_checks_of_the_start(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    policy = write(tmp_path / "policy.yaml", {"compression": {"profiles": str(profiles)}})
    with DaemonThread(Origin(policy, {}).load()) as running:
        reload = running.daemon.reload
        write(policy, {"compression": {"profiles": str(tmp_path / "absent")}, "leases": {"ttl": "9s"}})
        with pytest.raises(
            ApplianceError, match=r"compression\.profiles: .*absent cannot be read"
        ) as refused:
            running.wait(reload.apply())
        assert refused.value.reason == "BAD_POLICY"
        assert (reload.status.generation, running.daemon.planner.core.options.lease_ttl_s) == (1, 30)
        (profiles / "broken.yaml").write_text("{")
        write(policy, {"compression": {"profiles": str(profiles)}})
        assert running.wait(reload.from_file()) is None, "SIGHUP"
        assert "broken.yaml" in reload.status.last_error


def test_more_memory_than_there_is_is_refused_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "available_bytes", lambda: 64 * MIB)
    tiers = {"dram": {"capacity": "96MiB", "extent": "2MiB", "hugepages": "off"}}
    with pytest.raises(
        StartError, match=r"tiers\.dram\.capacity: .* take .* MiB, 64 MiB are available; lower"
    ):
        table.require(Settings.model_validate({"listen": [f"unix://{tmp_path}/k.sock"], "tiers": tiers}))


# --------------------------------------------------------------------------------------- places


def test_a_port_is_told_to_be_open_only_when_it_is(tmp_path: Path, tls: dict[str, str]) -> None:
    def lines(access: dict[str, Any]) -> list[tuple[CheckVerdict, str]]:
        plain = small_settings(tmp_path).model_dump(by_alias=True)
        settings = Settings.model_validate({**plain, "listen": ["0.0.0.0:1"], "access": access})
        return [(c.verdict, c.setting) for c in table.examine(Facts(settings), settings, [Scope.SETTINGS])]

    assert lines({"tls": tls}) == [(CheckVerdict.OK, "")]
    assert lines({"insecure": True}) == [(CheckVerdict.WARN, "access.insecure")]


def test_too_few_descriptors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with pytest.raises(StartError, match=r"open files: limit 64, 132 needed, .*; LimitNOFILE=1156"):
        table.require(small_settings(tmp_path))


def test_a_master_key_that_is_not_there_is_refused(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"encryption": {"master_key": str(tmp_path / "master.key")}}
    settings = small_settings(tmp_path, nvme=True, **sections)
    with pytest.raises(
        StartError, match=r"^encryption\.master_key: .*master\.key: No such file .*openssl rand"
    ):
        table.require(settings)


def test_the_server_extra_brings_what_the_default_settings_need(tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    brought = {re.split(r"[^\w.-]", line)[0] for line in project["optional-dependencies"]["server"]}
    settings = Settings.load(
        env={}, overrides=["tiers.dram.capacity=1GiB", "tiers.nvme={path: /data, capacity: 1GiB}"]
    )
    facts = Facts(settings, missing_modules=frozenset(probes.OPTIONAL_MODULES) - brought)
    checks = [c for c in table.examine(facts, settings, [Scope.HOST]) if c.name == "libraries"]
    assert checks == []
