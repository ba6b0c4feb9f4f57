"""`python -m bench.llamacpp`: time to first token of a long prompt in llama.cpp, computed and found again.

Found in kvtier by a new context, in llama-cpp-python's own caches on disk and in memory, and in the live
context. Run it with the environment that `make test-llamacpp` makes. A benchmark reports, it never asserts a
time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.vllm.appliance import ApplianceProcess
from tests.llamacpp.models import FIRST_TOKEN, VOCABULARY, make


def first_token_s(llm: Any, prompt: list[int]) -> tuple[float, str]:
    """Return the time to the first token in s, and the answer of eight tokens."""
    began_at, first_at, text = time.perf_counter(), 0.0, ""
    for chunk in llm.create_completion(prompt, max_tokens=8, temperature=0.0, stream=True):
        first_at = first_at or time.perf_counter()
        text += chunk["choices"][0]["text"]
    return first_at - began_at, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ApplianceProcess(dram="1GiB", nvme="") as appliance:
        appliance.wait_for_memory()
        print(json.dumps(measure(Path(name), appliance.target, given), indent=1))


def measure(folder: Path, target: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return seconds to the first token, by where the state came from; answers must be equal."""
    import llama_cpp
    from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

    from kvtier.clients.llamacpp import KvtierCache

    model = make(folder / "model.gguf", layers=8, width=512, heads=8, kv_heads=4)
    draw = random.Random(1)
    prompt = [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(given.tokens)]
    disk, memory = LlamaDiskCache(str(folder / "cache")), LlamaRAMCache()

    def context() -> Any:
        threads = {"n_threads": given.threads, "n_threads_batch": given.threads}
        return llama_cpp.Llama(
            str(model), n_ctx=given.tokens + 512, verbose=False, flash_attn=True, **threads
        )

    llm = context()
    kvtier = KvtierCache(llm, target)
    computed_s, answer = first_token_s(llm, prompt)
    state = llm.save_state()
    for cache in (kvtier, disk, memory):
        cache[tuple(prompt)] = state
    llm.close()
    found: dict[str, Callable[[Any], Any]] = {
        "kvtier": lambda llm: KvtierCache(llm, target),
        "LlamaDiskCache": lambda _: disk,
        "LlamaRAMCache": lambda _: memory,
    }
    times: dict[str, list[float]] = {"computed": [computed_s], **{name: [] for name in found}}
    answers = {answer}
    for name in list(found) * given.rounds:
        llm = context()
        llm.set_cache(found[name](llm))
        taken_s, answer = first_token_s(llm, prompt)
        times[name].append(taken_s)
        answers.add(answer)
        llm.close()
    return {
        "tokens": given.tokens,
        "state_bytes": given.tokens * 8 * 2 * 4 * 64 * 2,
        "answers_equal": len(answers) == 1,
        "first_token_s": {name: round(statistics.median(taken), 4) for name, taken in times.items()},
        "all": {name: [round(one, 4) for one in taken] for name, taken in times.items()},
    }


if __name__ == "__main__":
    main()
