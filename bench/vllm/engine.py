"""The engine's side: one vLLM in this process, told what to do in JSON lines (see bench/vllm/process.py).

The engine is driven through `LLMEngine.add_request`, `step` and `abort_request`, what vLLM's own servers
call: `LLM.generate` cannot abort, and does not say when a token came. Answers go to a copy of the original
standard output, because vLLM and its workers print to the one they inherit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from bench.vllm import extras

Answer = dict[str, Any]


@dataclass
class _Running:
    """One request on its way, and what came back so far."""

    ask: dict[str, Any]
    added_at_s: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runners_up: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    finish: str = ""
    transfer: Any = None
    others: dict[int, list[int]] = field(default_factory=dict)  # tokens of the second answer and further ones

    def take(self, output: Any, now_s: float) -> int:
        """Take in an output; return how many new tokens it brought."""
        self.others |= {one.index: list(one.token_ids) for one in output.outputs if one.index}
        if output.finished:
            self.finish = str(output.outputs[0].finish_reason)
        completion = next((one for one in output.outputs if not one.index), None)
        if completion is None:
            return 0
        num_new = len(completion.token_ids) - len(self.tokens)
        self.tokens = list(completion.token_ids)
        for entry in (completion.logprobs or [])[len(self.logprobs) :]:
            self._take_logprobs(entry, self.tokens[len(self.logprobs)])
        self.num_cached = output.num_cached_tokens or 0
        self.num_preemptions = getattr(output.metrics, "num_preemptions", 0)  # 0.30 brought it
        self.transfer = output.kv_transfer_params
        if num_new and not self.first_at_s:
            self.first_at_s = now_s
        self.last_at_s = now_s
        return num_new

    def _take_logprobs(self, entry: Any, token: int) -> None:
        others = [value.logprob for name, value in entry.items() if name != token]
        self.logprobs.append(entry[token].logprob)
        self.runners_up.append(max(others, default=float("-inf")))

    def wants_abort(self) -> bool:
        limit = self.ask.get("abort_after")
        return limit is not None and not self.finish and len(self.tokens) >= limit

    def answer(self) -> Answer:
        return {
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "runners_up": self.runners_up,
            "num_cached": self.num_cached,
            "num_preemptions": self.num_preemptions,
            "added_at_s": self.added_at_s,
            "first_at_s": self.first_at_s,
            "last_at_s": self.last_at_s,
            "finish": self.finish,
            "transfer": self.transfer,
            "others": [self.others[index] for index in sorted(self.others)],
        }


class VllmEngine:
    """Operations by name; each returns what is answered."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        arguments = {
            "dtype": options["dtype"],
            "enforce_eager": True,
            "block_size": options["block_tokens"],
            "max_model_len": options["max_model_tokens"],
            "max_num_batched_tokens": options["max_batch_tokens"],
            "max_num_seqs": options["max_requests"],
            "num_gpu_blocks_override": options["num_blocks"],
            "enable_prefix_caching": options["prefix_caching"],
            "tensor_parallel_size": options["num_workers"],
            "kv_transfer_config": options["connector"],
            "seed": options["seed"],
            "disable_log_stats": False,
            "max_logprobs": 2,
        }
        self._llm = LLM(options["model_path"], **arguments | options["more"])
        self._engine = self._llm.llm_engine
        self._in_one_process = options["in_one_process"]
        self._num_requests = 0

    def generate(self, requests: list[dict[str, Any]], trace: bool = False) -> Answer:
        """Run requests together. Each: tokens, num_new; optional salt, transfer, hints (JSON of kv_hints, for
        engines that have it), abort_after (tokens), arrive_at (tokens that all requests together must have
        produced before it is added), logprobs, and what extras.py knows."""
        running: dict[str, _Running] = {}
        asked: list[_Running] = []
        waiting = list(requests)
        num_tokens, steps = 0, []
        began_at_s = time.monotonic()
        while waiting or running:
            while waiting and (not running or num_tokens >= waiting[0].get("arrive_at", 0)):
                asked.append(self._add(waiting.pop(0), running))
            num_new = self._step(running)
            num_tokens += num_new
            if trace and num_new:
                steps.append((time.monotonic(), num_new))
        return {
            "requests": [one.answer() for one in asked],
            "began_at_s": began_at_s,
            "wall_s": time.monotonic() - began_at_s,
            "steps": steps,
        }

    def _add(self, ask: dict[str, Any], running: dict[str, _Running]) -> _Running:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"r{self._num_requests}"
        self._num_requests += 1
        extra = {"kv_transfer_params": ask["transfer"]} if ask.get("transfer") else None
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": ask["num_new"],
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 2 if ask.get("logprobs", True) else None,
            "output_kind": RequestOutputKind.CUMULATIVE,
            "extra_args": extra,
        }
        prompt = extras.prompt_of(ask)
        if ask.get("salt"):
            prompt["cache_salt"] = ask["salt"]
        one = running[name] = _Running(ask, time.monotonic())
        named = extras.arguments_of(ask)
        self._engine.add_request(name, prompt, SamplingParams(**sampling | extras.sampling_of(ask)), **named)
        return one

    def invoke(self, name: str, **arguments: Any) -> Answer:
        """Call a method of vLLM's `LLM`, e.g. `sleep`."""
        return {"returned": repr(getattr(self._llm, name)(**arguments))}

    def beam_search(self, tokens: list[int], width: int, num_new: int) -> Answer:
        """Return the tokens of the best `width` answers, each with the prompt's before it."""
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=width, max_tokens=num_new, ignore_eos=True)
        (found,) = self._llm.beam_search([{"prompt_token_ids": tokens}], params)
        return {"beams": [list(beam.tokens) for beam in found.sequences]}

    def _step(self, running: dict[str, _Running]) -> int:
        outputs = self._engine.step()
        now_s, num_new = time.monotonic(), 0
        for output in outputs:
            one = running.get(output.request_id)
            if one is None:
                continue  # was aborted while this output was on its way
            num_new += one.take(output, now_s)
            if one.wants_abort():
                self._engine.abort_request([output.request_id])
                one.finish = "aborted"
            if one.finish:
                del running[output.request_id]
        return num_new

    def reset(self, timeout_s: float = 150.0) -> Answer:
        """Reset the engine's own prefix cache, as soon as its blocks are not in use any more."""
        pause_s, deadline_s = 0.01, time.monotonic() + timeout_s
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"blocks of the engine are still held after {timeout_s} s without requests"
                )
            if self._in_one_process:
                self._engine.step()  # the only poll of what the connector still has under way
            time.sleep(pause_s)
        return {}

    def metrics(self) -> Answer:
        """Return the engine's counters and gauges: `name{label=value,...}` -> number."""
        values = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
                suffix = "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
                values[metric.name + suffix] = metric.value
        return {"values": values}


def _serve(engine: VllmEngine, channel: TextIO) -> None:
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer = getattr(engine, ask.pop("op"))(**ask)
        except Exception as problem:  # the parent decides what an engine's failure means
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), file=channel, flush=True)


def main() -> None:
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        options = json.loads(Path(sys.argv[1]).read_text())
        _serve(VllmEngine(options), channel)


if __name__ == "__main__":
    main()
