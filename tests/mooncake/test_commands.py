"""What commands say of a pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtier.appliance.cli.app import cli
from kvtier.appliance.preflight.checks_store import check_store
from kvtier.appliance.preflight.facts import try_store

from .running import Pool


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of a running pool."""
    with Pool(tmp_path) as running:
        yield f"mooncake://{running.address}/prod"


def run(*words: str) -> Result:
    """Run `kvtier objects`."""
    return CliRunner().invoke(cli, ["objects", *words])


def test_a_pool_has_what_is_needed_and_no_rules(url: str) -> None:
    checked = run("check", url)
    assert checked.exit_code == 0, checked.output
    assert "it makes room by itself" in checked.output
    for command in (["ls", url], ["verify", url], ["expire", url]):
        listed = run(*command)
        assert listed.exit_code == 1
        assert "a pool of Mooncake lists no objects" in " ".join(listed.output.split())


def test_doctor_says_that_nothing_protects_it(url: str) -> None:
    found = {check.name: check for check in check_store(try_store(url))}
    assert "no rights, no TLS" in found["object store, protection"].detail
    assert found["object store"].detail == f"{url}: list, create, create only, ranges, delete"
