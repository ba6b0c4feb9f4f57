"""Time to the first token on a new host: computed, and out of the store that another host left.

The first host has an engine and a daemon with an empty disk. It computes each prompt (`computed`), answers
it again from vLLM's own cache (`own cache`), and its daemon stores it (`object.share: eager`). Then engine
and daemon are killed, and the daemon's memory and disk are gone. A second host starts with empty memory and
an empty disk, and is asked each prompt once (`object store`). Answers of eight tokens with their
log-probabilities must be those of vLLM's own cache, bit for bit; both compute the same 24 tokens behind what
they found.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.table import ratio, render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.measure import seconds
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.options import kvtier_connector
from bench.vllm.priority import sampling
from bench.vllm.process import EngineProcess, Output
from bench.vllm.ttft import MID, warm_up
from tests.sources.objects.gateway import gateway
from tests.waiting import until

COMPUTED, OWN_CACHE, STORE = "computed", "own cache", "object store"
SIZES = (2048, 8192)  # tokens, whole bundles
NUM_ROUNDS = 3
NUM_REST_TOKENS = 24  # behind them: less than a block, so that both caches end at the same token
BUNDLE_TOKENS = 256
BUCKET = "vllm"


@dataclass(frozen=True)
class NewHostSample:
    """One answer. `num_cached`: tokens found; `is_exact`: whether it is vLLM's own, None: not asked."""

    road: str
    num_tokens: int
    ttft_s: float
    num_cached: int
    is_exact: bool | None = None


@dataclass(frozen=True)
class ComputedPrompt:
    """A prompt that the first host computed, and its answer from vLLM's own cache there."""

    tokens: list[int]
    expected: Output


@dataclass
class BenchHost:
    """An engine, and the daemon beside it."""

    engine: EngineProcess
    appliance: ApplianceProcess

    def ask(self, road: str, tokens: list[int]) -> tuple[NewHostSample, Output]:
        """Answer a prompt with eight tokens."""
        with sampling(self.engine.pid, self.appliance.session):
            warm_up(self.engine)
            (output,) = self.engine.generate({"tokens": tokens, "num_new": 8})
        sample = NewHostSample(road, len(tokens) - NUM_REST_TOKENS, output.ttft_s, output.num_cached)
        return sample, output

    def compute(self, tokens: list[int]) -> tuple[list[NewHostSample], ComputedPrompt]:
        """Answer a prompt by computing it, then out of vLLM's own cache."""
        computed, _ = self.ask(COMPUTED, tokens)
        own_cache, expected = self.ask(OWN_CACHE, tokens)
        self.engine.reset()  # succeeds when nothing is being saved any more
        return [computed, own_cache], ComputedPrompt(tokens, expected)

    def ask_again(self, road: str, prompt: ComputedPrompt) -> NewHostSample:
        """Answer a prompt that was computed elsewhere, and compare."""
        sample, got = self.ask(road, prompt.tokens)
        expected = prompt.expected
        is_exact = (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)
        return replace(sample, is_exact=is_exact and got.num_cached == expected.num_cached)

    def wait_until_stored(self, num_bundles: int) -> None:
        """Wait until this host has stored so many bundles."""
        until(lambda: self.appliance.status().source.exports["stored"] >= num_bundles, pause_s=0.05)


def new_prompt(chance: random.Random, num_tokens: int) -> list[int]:
    """Return random tokens, so many and the rest."""
    return [chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(num_tokens + NUM_REST_TOKENS)]


@contextmanager
def bench_host(folder: Path, name: str, url: str) -> Iterator[BenchHost]:
    """Start a host with empty memory and an empty disk that uses the store; kill it in the end."""
    settings = (f"object.url={url}", "object.share=eager", "observe.http=off")
    with ApplianceProcess(dram="1GiB", settings=settings) as appliance:
        options = replace(MID, connector=kvtier_connector(appliance.target))
        with EngineProcess(options, folder, name) as engine:
            appliance.wait_for_memory()
            warm_up(engine)
            appliance.wait_for_codecs()
            host = BenchHost(engine, appliance)
            host.ask("", new_prompt(random.Random(name), MID.max_batch_tokens))  # the first is slow
            yield host


@contextmanager
def bench_store(folder: Path, is_gateway: bool) -> Iterator[str]:
    """Yield the address of an empty store: a folder, or a bucket of Ceph's gateway that is started for it."""
    if not is_gateway:
        (folder / "store").mkdir()
        yield f"file://{folder}/store"
        return
    with gateway(folder / "ceph") as running:
        os.environ.update(running.environment())
        running.make_bucket(BUCKET)
        yield f"s3://{BUCKET}/kv"


def run(is_quick: bool, num_rounds: int = 0, is_gateway: bool = False) -> list[NewHostSample]:
    """Measure both hosts; `num_rounds` 0 is as many as usual. Raises EngineDied."""
    sizes = SIZES[:1] if is_quick else SIZES
    chance = random.Random(18)
    samples: list[NewHostSample] = []
    computed: list[ComputedPrompt] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        url = stack.enter_context(bench_store(folder, is_gateway))
        with bench_host(folder, "first", url) as first:
            num_bundles = MID.max_batch_tokens // BUNDLE_TOKENS  # of the prompt that every host begins with
            for size in sizes * (1 if is_quick else num_rounds or NUM_ROUNDS):
                tokens = new_prompt(chance, size)
                answers, prompt = first.compute(tokens)
                samples += answers
                computed.append(prompt)
                num_bundles += size // BUNDLE_TOKENS
                first.wait_until_stored(num_bundles)
        with bench_host(folder, "second", url) as second:
            samples += [second.ask_again(STORE, prompt) for prompt in computed]
    return samples


def report(samples: Sequence[NewHostSample]) -> str:
    """Return one row per size and road, the roads in the order of their samples; ratios are of medians."""
    names = list(dict.fromkeys(one.road for one in samples))
    rows = []
    for size in sorted({one.num_tokens for one in samples}):
        roads = {
            road: [one for one in samples if (one.road, one.num_tokens) == (road, size)] for road in names
        }
        medians = {road: statistics.median(one.ttft_s for one in many) for road, many in roads.items()}
        for road, many in roads.items():
            times = [one.ttft_s for one in many]
            num_exact = sum(one.is_exact is True for one in many)
            rows.append(
                [
                    *(str(size), road, seconds(medians[road]), seconds(min(times)), seconds(max(times))),
                    *(str(min(one.num_cached for one in many)), ratio(medians[COMPUTED] / medians[road])),
                    f"{num_exact} of {len(many)}" if many[0].is_exact is not None else "",
                ]
            )
    header = ["tokens", "from", "p50 s", "best", "worst", "cached", "of computed", "bit-identical"]
    return render(header, rows)
