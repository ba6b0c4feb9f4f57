"""Time to the first token on another host of a fleet: computed, own memory, and the memory of the others.

Three daemons in network namespaces, over links like LINK (examples/network.py), each beside a real engine.
The first host computes each prompt (`computed`) and answers it again from vLLM's own cache (`own cache`),
an answer of eight tokens with log-probabilities, which all others must give, bit for bit. The
second host reads the prompt from the first one's memory (`other host`), and once more from its own (`own
memory`). Then the first daemon is killed, and the third host reads from the second (`after a kill`).

vLLM's own tiers are not beside it: docs/operate/fleet.md says why.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.new_host import BenchHost, ComputedPrompt, NewHostSample, new_prompt
from bench.vllm.options import kvtier_connector
from bench.vllm.process import EngineProcess
from bench.vllm.ttft import MID, warm_up
from examples.network import NetworkHost, network
from tests.waiting import until

OTHER_HOST, OWN_MEMORY, AFTER_KILL = "other host", "own memory", "after a kill"
PORT = 7070
SIZES = (2048, 8192)  # tokens
NUM_ROUNDS = 2


def run(is_quick: bool, num_rounds: int, link: str) -> list[NewHostSample]:
    """Measure; `num_rounds` 0 is as many as usual. Raises EngineDied or RuntimeError."""
    sizes = SIZES[:1] if is_quick else SIZES * (num_rounds or NUM_ROUNDS)
    chance = random.Random(19)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        places = stack.enter_context(network(3, link))
        first, second, third = _hosts(stack, folder, places)
        samples, prompts = list[NewHostSample](), list[ComputedPrompt]()
        for size in sizes:
            prompt = new_prompt(chance, size)
            answers, computed = first.compute(prompt)
            samples += answers
            prompts.append(computed)
            _wait_until_known(second, first)
            for road in (OTHER_HOST, OWN_MEMORY):
                samples.append(second.ask_again(road, computed))
                second.engine.reset()
        _wait_until_known(third, second)
        first.appliance.kill()
        samples += [third.ask_again(AFTER_KILL, prompt) for prompt in prompts]
    return samples


def _hosts(stack: ExitStack, folder: Path, places: Sequence[NetworkHost]) -> list[BenchHost]:
    """Start daemons and engines, the engines at the same time."""
    addresses = [f"{place.address}:{PORT}" for place in places]
    settings = (f"peers.hosts=[{', '.join(addresses)}]", "access.insecure=true", "observe.http=off")
    appliances = [
        stack.enter_context(
            ApplianceProcess(
                dram="1GiB", nvme="", settings=settings, address=address, prefix=tuple(place.prefix)
            )
        )
        for place, address in zip(places, addresses, strict=True)
    ]
    engines = [
        stack.enter_context(
            EngineProcess(replace(MID, connector=kvtier_connector(one.target)), folder, f"engine-{number}")
        )
        for number, one in enumerate(appliances)
    ]
    hosts = [BenchHost(engine, one) for engine, one in zip(engines, appliances, strict=True)]
    for number, host in enumerate(hosts):
        host.engine.ready()
        host.appliance.wait_for_memory()
        warm_up(host.engine)
        host.ask("", [FIRST_TOKEN + number] + [VOCABULARY - 1] * MID.max_batch_tokens)  # the first is slow
    return hosts


def _wait_until_known(host: BenchHost, other: BenchHost) -> None:
    """Wait until a host knows of all blocks that another one has."""

    def knows() -> bool:
        num_blocks = other.appliance.num_blocks()
        return any(one.num_blocks == num_blocks for one in host.appliance.status().hosts)

    until(knows, "a host knows all blocks of another one", pause_s=0.05)
