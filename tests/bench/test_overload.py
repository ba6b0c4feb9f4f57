"""The callers of bench.overload that write HTTP/2 frames themselves, against a server of gRPC."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.machine import ROOT
from bench.overload_raw import Callers


@pytest.mark.parametrize("refused_share", [0.0, 0.5, 1.0])
def test_calls_without_a_grpc_client_are_answered_and_refused(tmp_path: Path, refused_share: float) -> None:
    path = tmp_path / "floor.sock"
    task = {"path": str(path), "refused_share": refused_share, "told_ms": 20}
    command = [sys.executable, "-m", "bench.overload_floor", json.dumps(task)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            found = Callers(
                {
                    "target": f"unix://{path}",
                    "num_callers": 6,
                    "num_channels": 2,
                    "num_hashes": 16,
                    "deadline_s": 60.0,
                    "namespace_id": 1,
                    "token": "kvt_test",
                    "seconds": 1.0,
                }
            ).run()
        finally:
            server.kill()
    assert found["other"] == {}
    assert bool(found["accepted"]) == (refused_share < 1)
    assert bool(found["refused"]) == (refused_share > 0)
    assert found["told_s"] == pytest.approx(0.02 * len(found["refused"]))
