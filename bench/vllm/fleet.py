"""Time to the first token on another host of a fleet: computed, own memory, and the memory of the others.

Three daemons in network namespaces, over links like LINK (examples/network.py), each beside a real engine, of
which two run at a time. They find each other in etcd, on a host of its own, where that is installed.
The first host computes each prompt (`computed`) and answers it again from vLLM's own cache (`own cache`),
an answer of eight tokens with log-probabilities, which all others must give, bit for bit. The
second host reads the prompt from the first one's memory (`other host`), and once more from its own (`own
memory`). Then the first host is killed, and the third one reads from the second (`after a kill`).

Last, where the package `nixl` is, the same between two engines with vLLM's NixlConnector and nothing of
kvtier (`NixlConnector`): the first computes the prompt and is told to hand it over. It does so once, with the
24 tokens behind it, which the others compute: so only tokens are compared, and vLLM counts none as cached.
vLLM's P2P tier does not run on the CPU: docs/operate/fleet.md says why.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.new_host import NUM_REST_TOKENS, BenchHost, ComputedPrompt, NewHostSample, new_prompt
from bench.vllm.options import Connector, kvtier_connector
from bench.vllm.process import EngineProcess
from bench.vllm.ttft import MID, warm_up
from examples.directory import directory
from examples.network import NetworkHost, network
from tests.waiting import until

OTHER_HOST, OWN_MEMORY, AFTER_KILL, NIXL = "other host", "own memory", "after a kill", "NixlConnector"
PORT = 7070
NUM_HOSTS = 3
SIZES = (2048, 8192)  # tokens
NUM_ROUNDS = 2
OWN_ADDRESS = "VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"
UCX = {"UCX_TLS": "tcp,self"}  # else it finds that the hosts share their memory
HANDED_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


def run(is_quick: bool, num_rounds: int, link: str) -> list[NewHostSample]:
    """Measure; `num_rounds` 0 is as many as usual. Raises EngineDied or RuntimeError."""
    sizes = SIZES[:1] if is_quick else SIZES * (num_rounds or NUM_ROUNDS)
    chance = random.Random(19)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        *places, last = stack.enter_context(network(NUM_HOSTS + 1, link))
        url = stack.enter_context(directory("etcd", last))
        print(f"\nhosts find each other {f'at {url}' if url else 'in a list: etcd is not installed'}")
        appliances = _appliances(stack, places, url)
        first, second = _hosts(stack, folder, places[:2], appliances[:2])
        samples, prompts = list[NewHostSample](), list[ComputedPrompt]()
        for size in sizes:
            prompt = new_prompt(chance, size)
            answers, computed = first.compute(prompt)
            samples += answers
            prompts.append(computed)
            _wait_until_known(second.appliance, first.appliance)
            for road in (OTHER_HOST, OWN_MEMORY):
                samples.append(second.ask_again(road, computed))
                second.engine.reset()
        first.appliance.kill()
        first.engine.kill()
        (third,) = _hosts(stack, folder, places[2:], appliances[2:])
        _wait_until_known(third.appliance, second.appliance)
        samples += [third.ask_again(AFTER_KILL, prompt) for prompt in prompts]
        second.engine.kill()
        third.engine.kill()
        if importlib.util.find_spec("nixl") is None:
            print("without NixlConnector: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1")
        else:
            samples += _by_nixl(stack, folder, places[:2], prompts)
    return samples


def _appliances(stack: ExitStack, places: Sequence[NetworkHost], url: str) -> list[ApplianceProcess]:
    """Start the daemons."""
    addresses = [f"{place.address}:{PORT}" for place in places]
    peers = f"peers.directory.url={url}" if url else f"peers.hosts=[{', '.join(addresses)}]"
    settings = (peers, "access.insecure=true", "observe.http=off")
    return [
        stack.enter_context(
            ApplianceProcess(
                dram="1GiB", nvme="", settings=settings, address=address, prefix=tuple(place.prefix)
            )
        )
        for place, address in zip(places, addresses, strict=True)
    ]


def _engines(
    stack: ExitStack, folder: Path, places: Sequence[NetworkHost], connectors: Sequence[Connector]
) -> list[EngineProcess]:
    """Start engines at the same time, and let each answer something long: the first answer is slow."""
    engines = []
    for place, connector in zip(places, connectors, strict=True):
        options = replace(
            MID, connector=connector, environment=dict.fromkeys(OWN_ADDRESS, place.address) | UCX
        )
        name = f"{connector['kv_connector']}-{place.namespace}"
        engines.append(stack.enter_context(EngineProcess(options, folder, name, prefix=place.prefix)))
    for place, engine in zip(places, engines, strict=True):
        engine.ready()
        warm_up(engine)
        first_token = FIRST_TOKEN + int(place.address.rpartition(".")[2])
        tokens = [first_token] + [VOCABULARY - 1] * MID.max_batch_tokens
        engine.generate({"tokens": tokens, "num_new": 8})
    return engines


def _hosts(
    stack: ExitStack, folder: Path, places: Sequence[NetworkHost], appliances: Sequence[ApplianceProcess]
) -> list[BenchHost]:
    """Start engines beside daemons."""
    for one in appliances:
        one.wait_for_memory()
    engines = _engines(stack, folder, places, [kvtier_connector(one.target) for one in appliances])
    return [BenchHost(engine, one) for engine, one in zip(engines, appliances, strict=True)]


def _by_nixl(
    stack: ExitStack, folder: Path, places: Sequence[NetworkHost], prompts: Sequence[ComputedPrompt]
) -> list[NewHostSample]:
    """Hand prompts over from one engine to another by vLLM's own connector."""
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    prefill, decode = _engines(stack, folder, places, [connector] * 2)
    samples = list[NewHostSample]()
    unmeasured = ComputedPrompt(new_prompt(random.Random("nixl"), SIZES[0]), prompts[0].expected)
    for prompt in (unmeasured, *prompts):  # with the first one they make each other's acquaintance
        (computed,) = prefill.generate({"tokens": prompt.tokens, "num_new": 1, "transfer": HANDED_OVER})
        warm_up(decode)
        (got,) = decode.generate({"tokens": prompt.tokens, "num_new": 8, "transfer": computed.transfer})
        if samples and got.tokens != prompt.expected.tokens:
            raise RuntimeError(f"{NIXL}: {got.tokens} instead of {prompt.expected.tokens}")
        samples.append(NewHostSample(NIXL, len(prompt.tokens) - NUM_REST_TOKENS, got.ttft_s, got.num_cached))
    return samples[1:]


def _wait_until_known(host: ApplianceProcess, other: ApplianceProcess) -> None:
    """Wait until a host knows of all blocks that another one has."""

    def knows() -> bool:
        num_blocks = other.num_blocks()
        return any(one.num_blocks == num_blocks for one in host.status().hosts)

    until(knows, "a host knows all blocks of another one", pause_s=0.05)
