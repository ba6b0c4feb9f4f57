"""An appliance that dies, hangs or was never there costs hits, and nothing else.

The engine runs as it is deployed, in its own three processes. Which requests are on their way when the
signal comes is left to chance on purpose; what must hold does not depend on it.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.process import EngineProcess, Output, outputs_of

from ...waiting import until
from .comparison import difference
from .rig import SEED, SMALL
from .traffic import Traffic

Ask = dict[str, object]
NUM_PROMPTS = 24
DEPLOYED = replace(SMALL, in_one_process=False, max_requests=4)


class Scene:
    """An engine, its appliance, and prompts whose right answers are known."""

    def __init__(self, engine: EngineProcess, appliance: ApplianceProcess, asks: list[Ask]) -> None:
        self.engine = engine
        self.appliance = appliance
        self.asks = asks
        self.expected: list[Output] = []

    def assert_right(self, got: list[Output]) -> None:
        for expected, output in zip(self.expected, got, strict=True):
            assert output.finish == "length"
            assert not difference(expected, output)

    def run(self) -> list[Output]:
        """Every prompt, several at a time, with nothing in the engine's own cache; answers are checked."""
        self.engine.reset()
        got = self.engine.generate(*self.asks)
        self.assert_right(got)
        return got

    def start_run(self) -> None:
        self.engine.reset()
        self.engine.send("generate", requests=self.asks)

    def end_run(self) -> None:
        self.assert_right(outputs_of(self.engine.receive()))

    def run_until_hits(self) -> None:
        """Hits come back by themselves. Raises AssertionError when they never do."""
        until(lambda: any(output.num_cached for output in self.run()), "no hit")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The engine is started before its appliance: it must serve without one."""
    folder = tmp_path_factory.mktemp("failures")
    traffic = Traffic(SEED, SMALL.block_tokens, max_tokens=700)
    asks: list[Ask] = [
        {"tokens": traffic.words(200 + 16 * number), "num_new": 20} for number in range(NUM_PROMPTS)
    ]
    appliance = ApplianceProcess()
    options = replace(DEPLOYED, connector=kvtier_connector(appliance.target))
    with EngineProcess(options, folder) as engine:
        scene = Scene(engine, appliance, asks)
        scene.expected = engine.generate(*asks)
        with appliance:
            yield scene


def test_an_appliance_that_comes_late_is_found(scene: Scene) -> None:
    assert {output.finish for output in scene.expected} == {"length"}
    scene.run_until_hits()


def test_kill_9_under_load(scene: Scene) -> None:
    scene.run_until_hits()
    for _ in range(2):
        scene.start_run()
        scene.appliance.kill()
        scene.end_run()
        scene.run()  # while it is gone
        scene.appliance.start()
        scene.run_until_hits()
    scene.appliance.check_integrity()


def test_a_silent_appliance_is_a_miss(scene: Scene) -> None:
    scene.run_until_hits()
    scene.start_run()
    scene.appliance.freeze()
    scene.end_run()
    scene.run()
    scene.appliance.thaw()
    scene.run_until_hits()
    scene.appliance.check_integrity()
