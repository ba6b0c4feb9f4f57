"""The two engines of a comparison, kept in step.

The *reference* is vLLM alone with its own prefix cache, and sees every request of the run. The *subject*
has kvtier and, before a request, forgets its own cache, so that what it does not compute came from the
appliance. By induction both then hold the same bits for the same block: each was computed once, in the same
step of the same request. A reference that computed whole prompts anew would not do: in bfloat16 vLLM's own
cache hit differs from it, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import EngineOptions, kvtier_connector
from bench.vllm.process import EngineProcess, Output

from .. import patience
from .comparison import Tally, difference, exact_difference
from .traffic import Traffic, Turn

FULL = os.environ.get("FULL") == "1"
SEED = int(os.environ.get("SEED", "1"))
WAIT_S = 120.0  # how long something may take that is only slow; nothing here measures time
BLOCK_TOKENS = 32
SMALL = EngineOptions(block_tokens=BLOCK_TOKENS, num_blocks=4096, in_one_process=True)


class Rig:
    """Reference, subject and appliance, and the books about what the appliance must hold."""

    def __init__(
        self, folder: Path, options: EngineOptions, appliance: ApplianceProcess, changes: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.appliance = appliance
        self.options = options
        connector = kvtier_connector(appliance.target, **patience.CONNECTOR)
        self.with_kvtier = replace(options, connector=connector, **changes)
        self.reference = EngineProcess(options, folder, "reference")
        self.subject = EngineProcess(self.with_kvtier, folder, "subject")
        self._num_restarts = 0
        self._blocks: set[int] = set()

    def restart_subject(self, **changes: Any) -> None:
        """A new process of the engine, which has never seen any of the prompts."""
        self.subject.stop()
        self._num_restarts += 1
        name = f"subject-{self._num_restarts}"
        self.subject = EngineProcess(replace(self.with_kvtier, **changes), self.folder, name)

    def ask(self, turn: Turn, tally: Tally, traffic: Traffic) -> None:
        """One request to both, alone; compare; continue its conversation."""
        self.subject.reset()
        (expected,) = self.reference.generate(turn.request)
        (got,) = self.subject.generate(turn.request)
        tally.num_requests += 1
        tally.num_prompt_tokens += len(turn.tokens)
        tally.num_hits += got.num_cached > 0
        tally.num_hit_tokens += got.num_cached
        is_aligned = turn.is_aligned(self.options.block_tokens)
        is_short = got.num_cached < expected.num_cached or (
            got.num_cached > expected.num_cached and not is_aligned
        )
        tally.num_short += is_short
        if is_short or is_aligned:
            problem = difference(expected, got) if self.options.dtype == "float32" else ""
        else:
            tally.num_exact += 1
            problem = exact_difference(expected, got)
        if problem:
            tally.mismatches.append(f"request {tally.num_requests}, {len(turn.tokens)} tokens: {problem}")
        traffic.answered(turn, expected.tokens)
        if is_short or problem:
            traffic.retire(turn)  # its blocks were computed in other steps than the reference's
        self.computed(turn, expected)

    def computed(self, turn: Turn, output: Output) -> None:
        """Note the blocks that this request filled. The last token's KV was never computed."""
        tokens = (turn.tokens + output.tokens)[:-1]
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            self._blocks.add(hash((turn.conversation.salt, tokens[:end])))

    def settle(self) -> None:
        """Wait until the appliance holds every block once. Raises AssertionError when it never does."""
        settled(self.subject, self.appliance, len(self._blocks))

    def wake_with(self, traffic: Traffic) -> None:
        """Ask for something stored until it is found: the appliance is new, the engine is not."""
        history = max((one for one in traffic.conversations), key=lambda one: len(one.history))
        request = {"tokens": history.history[:-1], "num_new": 1, "salt": history.salt}
        deadline_s = time.monotonic() + WAIT_S
        while True:
            self.subject.reset()
            (got,) = self.subject.generate(request)
            if got.num_cached > 0:
                return
            assert time.monotonic() < deadline_s, f"no hit {WAIT_S:.0f} s after the appliance came back"

    def close(self) -> None:
        self.reference.__exit__(None, None, None)
        self.subject.__exit__(None, None, None)


def settled(engine: EngineProcess, appliance: ApplianceProcess, num_blocks: int | None = None) -> None:
    """Wait until nothing is being saved any more and, if it is known, until all of `num_blocks` are there."""
    engine.reset()  # succeeds when no save holds a block of the engine
    deadline_s = time.monotonic() + WAIT_S
    while num_blocks is not None and (num_there := appliance.num_blocks()) != num_blocks:
        assert num_there < num_blocks, f"{num_there} blocks of {num_blocks} distinct ones"
        assert time.monotonic() < deadline_s, f"{num_there} of {num_blocks} blocks arrived"


@contextmanager
def rig(
    folder: Path,
    options: EngineOptions = SMALL,
    changes: dict[str, Any] | None = None,
    appliance_settings: tuple[str, ...] = (),
) -> Iterator[Rig]:
    """Start both engines and the appliance; leave nothing. `changes` are options of the subject only."""
    with ApplianceProcess(settings=appliance_settings) as appliance:
        engines = Rig(folder, options, appliance, changes or {})
        try:
            yield engines
        finally:
            engines.close()
