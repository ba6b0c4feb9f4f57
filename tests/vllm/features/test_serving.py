"""`vllm serve` as it is deployed: an engine with several ranks by data, each with a cache of its own."""

from pathlib import Path

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.proxy import Server, serve

from ...ports import free_port
from .. import patience
from .scene import words

SETTINGS = {"PYTHONHASHSEED": "0", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each rank
TWO = ("--data-parallel-size", "2")


def test_data_parallel(tmp_path: Path) -> None:
    """What one rank computed, the other finds; a dead kvtier is a miss for both."""
    with ApplianceProcess() as appliance:
        connector = kvtier_connector(appliance.target, **patience.CONNECTOR)
        server = serve(connector, free_port(), tmp_path / "server.log", SETTINGS, *TWO)
        try:
            try:
                server.wait("/health")
            except SystemExit as problem:
                skip_if_it_cannot_alone(tmp_path)
                pytest.fail(f"only with kvtier the engine does not start: {problem}")
            for number, (one, other) in enumerate(((0, 1), (1, 0))):
                prompt = words(number, 330)
                computed = server.ask(prompt, rank=one)
                found = server.ask(prompt, rank=other)
                assert (computed.num_ours, found.num_ours) == (0, 320)
                assert found.tokens == computed.tokens
            appliance.kill()
            for rank in (0, 1):
                assert server.ask(words(2, 330), rank=rank).num_ours == 0
        finally:
            server.kill()


def skip_if_it_cannot_alone(folder: Path) -> None:
    server: Server = serve(None, free_port(), folder / "alone.log", SETTINGS, *TWO)
    try:
        server.wait("/health")
    except SystemExit as problem:
        pytest.skip(f"this build of the engine cannot: {str(problem).splitlines()[-1][:160]}")
    finally:
        server.kill()
