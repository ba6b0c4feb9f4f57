"""What `helm test` runs, against a daemon beside it: over IPv6, which a cluster may have alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..daemon import Daemon
from ..ports import free_port
from .charts import CHART


@pytest.mark.parametrize(("host", "address"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1")])
def test_a_daemon_is_asked_at_its_address(host: str, address: str, tmp_path: Path) -> None:
    interfaces = Path("/proc/net/if_inet6")
    if host == "::1" and not (interfaces.exists() and "0" * 31 + "1" in interfaces.read_text()):
        pytest.skip("this host has no IPv6")
    port = free_port()
    with Daemon(
        tmp_path, settings=("tiers.dram.capacity=64MiB", f"observe.http='{address}:{port}'")
    ) as daemon:
        variables = {"CHECK_HOST": host, "CHECK_PORT": str(port), "CHECK_PUT": "yes"}
        checked = subprocess.run(
            [sys.executable, str(CHART / "files" / "check.py")],
            capture_output=True,
            text=True,
            env={**os.environ, **variables, "KVTIER_TARGET": daemon.target},
        )
    assert checked.returncode == 0, checked.stderr
    assert "readiness: serving" in checked.stdout
    assert "put and got 4 blocks" in checked.stdout
