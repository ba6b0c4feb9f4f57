"""Prefill in one engine, decode in another, each with a daemon of its own: the tokens of one engine alone.

A proxy's part is played here: what the prefill engine's answer has in `kv_transfer_params` goes into the
request of the decode engine, as vLLM's toy proxy, llm-d's sidecar and Dynamo hand it over.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.process import EngineProcess, Output, outputs_of

from ...ports import free_port
from .. import patience
from .comparison import difference
from .rig import SEED, SMALL, WAIT_S
from .traffic import Traffic

BLOCK = SMALL.block_tokens
OF_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
ALONE = {"kvtier_load": False, "kvtier_save": False}
CHUNKED = replace(SMALL, max_batch_tokens=256)


class Scene(NamedTuple):
    """Two engines, their daemons, and prompts that nothing has computed yet."""

    prefill: EngineProcess
    decode: EngineProcess
    of_prefill: ApplianceProcess
    of_decode: ApplianceProcess
    address: str  # of the prefill engine's daemon
    traffic: Traffic

    def alone(self, tokens: list[int]) -> Output:
        """Return what one engine alone answers."""
        (output,) = self.prefill.generate({"tokens": tokens, "num_new": 6, "transfer": ALONE})
        self.prefill.reset()
        return output

    def hand_over(self, tokens: list[int]) -> dict[str, Any]:
        """Compute a prompt in the prefill engine; return what a proxy gets of it, as JSON carries it."""
        (output,) = self.prefill.generate({"tokens": tokens, "num_new": 1, "transfer": OF_PREFILL})
        told: dict[str, Any] = json.loads(json.dumps(output.transfer))
        return told

    def decoded(self, tokens: list[int], told: dict[str, Any] | None) -> Output:
        """Return what the decode engine answers."""
        (output,) = self.decode.generate({"tokens": tokens, "num_new": 6, "transfer": told})
        return output


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("hand-over")
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    fleet = (f"peers.hosts=[{', '.join(addresses)}]", "access.insecure=true", "observe.http=off")
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(ApplianceProcess(nvme="", settings=fleet, address=one)) for one in addresses
        ]
        engines = []
        for name, daemon in zip(("prefill", "decode"), daemons, strict=True):
            connector = kvtier_connector(daemon.target, handover_wait_s=WAIT_S, **patience.CONNECTOR)
            options = replace(CHUNKED, connector=connector)
            engines.append(stack.enter_context(EngineProcess(options, folder, name)))
        for engine in engines:
            engine.ready()
        (prefill, decode), (first, second) = engines, daemons
        traffic = Traffic(SEED, BLOCK, max_tokens=900)
        here = Scene(prefill, decode, first, second, addresses[0], traffic)
        ends_at = time.monotonic() + WAIT_S
        while True:  # until the hosts know each other, and the prefill engine its daemon
            tokens = here.traffic.words(4 * BLOCK + 1)
            told = here.hand_over(tokens)
            if told and here.decoded(tokens, told).num_cached:
                break
            assert time.monotonic() < ends_at, f"nothing is handed over: {told}"
        yield here


def test_a_prompt_that_was_computed_elsewhere_is_only_decoded_here(scene: Scene) -> None:
    tokens = scene.traffic.words(20 * BLOCK + 5)
    expected = scene.alone(tokens)
    told = scene.hand_over(tokens)
    assert list(told) == ["kvtier_source"], "keys of other connectors are theirs"
    assert told["kvtier_source"]["num_tokens"] == 20 * BLOCK
    got = scene.decoded(tokens, told)
    assert got.num_cached == 20 * BLOCK
    assert not difference(expected, got)


def test_decode_may_be_asked_before_prefill_has_ended(scene: Scene) -> None:
    tokens = scene.traffic.words(60 * BLOCK + 5)
    expected = scene.alone(tokens)
    source = {"kvtier_source": {"host": scene.address}}
    scene.decode.send("generate", requests=[{"tokens": tokens, "num_new": 6, "transfer": source}])
    scene.hand_over(tokens)
    (got,) = outputs_of(scene.decode.receive())
    assert got.num_cached > 0
    assert not difference(expected, got)


@pytest.mark.parametrize("wrong", ["last", "namespace", "epoch"])
def test_what_does_not_fit_is_computed(scene: Scene, wrong: str) -> None:
    tokens = scene.traffic.words(6 * BLOCK + 5)
    expected = scene.alone(tokens)
    told = scene.hand_over(scene.traffic.words(6 * BLOCK + 5))
    told["kvtier_source"][wrong] = "ab" * 16
    assert not difference(expected, scene.decoded(tokens, told))


def test_each_part_that_dies_costs_computing_and_no_request(scene: Scene) -> None:
    prompts = [scene.traffic.words(20 * BLOCK + 5) for _ in range(3)]
    expected = [scene.alone(tokens) for tokens in prompts]
    told = [scene.hand_over(tokens) for tokens in prompts]
    scene.of_decode.kill()  # decode's own daemon
    assert not difference(expected[0], scene.decoded(prompts[0], told[0]))
    scene.of_decode.start()
    tokens = scene.traffic.words(60 * BLOCK + 5)
    alone = scene.alone(tokens)
    source = {"kvtier_source": {"host": scene.address}}
    scene.decode.send("generate", requests=[{"tokens": tokens, "num_new": 6, "transfer": source}])
    scene.prefill.kill()  # while decode waits for it
    scene.of_prefill.kill()
    (got,) = outputs_of(scene.decode.receive())
    assert not difference(alone, got)
    for number in (1, 2):  # what was handed over is gone with its daemon
        assert not difference(expected[number], scene.decoded(prompts[number], told[number]))
