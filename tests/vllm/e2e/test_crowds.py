"""Many requests at once in an engine that has too little memory for them.

Its cache holds a few of them, so it preempts, and gets back from the appliance what it had to drop; prompts
are prefilled in small chunks; some requests are aborted half-way, some of them while they wait for a load;
in mid-run the appliance is killed with requests on their way, and started again. Every answer is compared
with the same request, alone, in an engine that lacks nothing.
"""

import random
from pathlib import Path

from vllm.v1.metrics.stats import RequestStateStats

from bench.vllm.process import Output, outputs_of

from .comparison import Tally, difference
from .rig import FULL, SEED, SMALL, Rig, rig
from .traffic import Traffic, Turn

CROWDED = {"num_blocks": 40, "max_model_tokens": 1024, "max_batch_tokens": 192, "max_requests": 8}
NUM_ROUNDS = 12 if FULL else 5
CROWD = 14


def crowd(traffic: Traffic, chance: random.Random) -> list[tuple[Turn, dict[str, object]]]:
    """Draw requests that arrive one after the other while earlier ones run."""
    drawn = []
    for number in range(CROWD):
        turn = traffic.turn()
        extra: dict[str, object] = {"arrive_at": number * chance.randrange(6)}
        if chance.random() < 0.2:
            extra["abort_after"] = chance.randrange(turn.num_new)
        traffic.retire(turn)  # its next turn needs its answer; there are enough others
        drawn.append((turn, {**turn.request, **extra}))
    return drawn


def check(turns: list[Turn], expected: list[Output], got: list[Output], tally: Tally) -> None:
    for turn, right, output in zip(turns, expected, got, strict=True):
        tally.num_requests += 1
        tally.num_prompt_tokens += len(turn.tokens)
        tally.num_hits += output.num_cached > 0
        tally.num_hit_tokens += output.num_cached
        tally.num_aborted += output.finish == "aborted"
        if output.finish not in ("length", "aborted"):
            tally.mismatches.append(f"request {tally.num_requests} ended with {output.finish}")
        if problem := difference(right, output):
            tally.mismatches.append(f"request {tally.num_requests}, {len(turn.tokens)} tokens: {problem}")


def test_preempted_aborted_and_bereaved_requests_answer_right(tmp_path: Path) -> None:
    tally, chance = Tally(SEED), random.Random(SEED)
    traffic = Traffic(SEED, SMALL.block_tokens, max_tokens=900, max_new=80)
    num_preemptions = 0
    with rig(tmp_path, changes=CROWDED) as engines:
        for number in range(NUM_ROUNDS):
            drawn = crowd(traffic, chance)
            turns = [turn for turn, _ in drawn]
            expected = [engines.reference.generate(turn.request)[0] for turn in turns]
            got = run_round(engines, [ask for _, ask in drawn], is_killed=number % 4 == 3)
            check(turns, expected, got, tally)
            num_preemptions += sum(output.num_preemptions for output in got)
            for turn, output in zip(turns, expected, strict=True):
                traffic.resume(turn, output.tokens)
            engines.appliance.check_integrity()
        hits = engines.subject.metrics()["vllm:external_prefix_cache_hits"]
        print(f"\n{tally}, {num_preemptions} preemptions, {hits:.0f} tokens from the appliance")
    assert tally.mismatches == []
    assert num_preemptions > 0 or not hasattr(RequestStateStats(), "num_preemptions")  # before 0.30
    assert tally.num_aborted > 0
    assert hits > 0


def run_round(engines: Rig, asks: list[dict[str, object]], is_killed: bool) -> list[Output]:
    engines.subject.send("generate", requests=asks)
    if is_killed:
        engines.appliance.kill()
    got = outputs_of(engines.subject.receive())
    if is_killed:
        engines.appliance.start()
    return got
