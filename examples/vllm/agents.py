"""Many agents with one long system prompt and a few words of their own, through two engines.

    python -m examples.vllm.agents

The first engine's first agent computes the system prompt; every other one, in the other engine, too, finds
it. The appliance holds its blocks once, however many agents there are.
"""

import statistics

from examples.texts import SYSTEM_TEXT
from examples.vllm.server import BLOCK_TOKENS, Completion, Server, daemon

NUM_AGENTS = 40


def main() -> None:
    with daemon() as appliance:
        appliance.start()
        first, second = (Server(appliance.target, appliance.folder) for _ in range(2))
        with first, second:
            answers = []
            for number in range(NUM_AGENTS):
                server = (first, second)[number % 2]
                answers.append(server.ask(f"{SYSTEM_TEXT}\n\nAgent {number}:", num_new=2))
            report(answers)
        num_blocks, num_shared = appliance.status().num_blocks, answers[0].num_tokens // BLOCK_TOKENS
    print(f"The appliance holds {num_blocks} blocks; one prompt has {num_shared}.")


def report(answers: list[Completion]) -> None:
    num_tokens = sum(answer.num_tokens for answer in answers)
    num_cached = sum(answer.num_cached for answer in answers)
    alone, second, *others = answers
    median_s = statistics.median(answer.ttft_s for answer in others)
    print(f"{NUM_AGENTS} agents sent {num_tokens:,} tokens, {num_cached:,} of them were not computed.")
    print(f"The second engine's first agent found {second.num_cached:,} of its {second.num_tokens:,} tokens.")
    print(
        f"First token after {alone.ttft_s:.3f} s for the very first agent, {median_s:.3f} s for the others."
    )


if __name__ == "__main__":
    main()
