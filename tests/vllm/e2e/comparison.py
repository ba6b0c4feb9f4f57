"""When are two answers the same?

*Exactly*: same tokens, same log-probabilities, bit for bit. That is owed when both engines computed every
token in the same steps: one request at a time, the same tokens found cached, the rest in one step. A hit
then differs from vLLM's own only in where the bytes came from.

*In substance*: requests that run together are batched by chance, and the sums in a matrix product are
ordered by the size of the batch. In float32 that moves a log-probability by some 1e-5. One block of ten to
seventeen that holds another one's bytes moved the first by 0.04 to 0.7 when it was tried. Greedy choices
agree, except where the model itself is undecided to within the noise; an answer is compared up to such a
tie.

Two whole blocks that change places are no mistake in substance (keys carry their positions), and only bits
tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.vllm.process import Output

NOISE = 2e-3


def exact_difference(expected: Output, got: Output) -> str:
    """Say where the answers differ in any bit; empty when they do not."""
    if expected.tokens != got.tokens:
        where = first_difference(expected.tokens, got.tokens)
        return f"token {where}: expected {expected.tokens[where:]}, got {got.tokens[where:]}"
    if expected.logprobs != got.logprobs:
        where = first_difference(expected.logprobs, got.logprobs)
        return f"log-probability {where}: expected {expected.logprobs[where]!r}, got {got.logprobs[where]!r}"
    return ""


def difference(expected: Output, got: Output) -> str:
    """Say where the answers differ in substance. An aborted answer is compared as far as it goes."""
    pairs = zip(
        expected.tokens, got.tokens, expected.logprobs, got.logprobs, expected.runners_up, strict=False
    )
    for where, (token, other, logprob, other_logprob, runner_up) in enumerate(pairs):
        if token != other:
            is_tie = logprob - runner_up <= NOISE
            return "" if is_tie else f"token {where}: expected {token}, got {other}"
        if abs(logprob - other_logprob) > NOISE:
            return f"log-probability {where}: expected {logprob}, got {other_logprob}"
    if got.finish != "aborted" and len(expected.tokens) != len(got.tokens):
        return f"expected {len(expected.tokens)} tokens, got {len(got.tokens)}: {got.finish}"
    return ""


def first_difference(left: tuple[float, ...], right: tuple[float, ...]) -> int:
    """Index of the first element that is not the same, or the shorter one's length."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


@dataclass
class Tally:
    """What a run has shown, for people to read and for the test to judge."""

    seed: int
    num_requests: int = 0
    num_exact: int = 0  # compared bit for bit
    num_hits: int = 0  # found something in the appliance
    num_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_short: int = 0  # found less than the reference: nothing wrong, and nothing to compare bit for bit
    num_aborted: int = 0
    mismatches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.num_requests} requests, {self.num_exact} compared bit for bit, "
            f"{self.num_hits} hits ({self.num_hit_tokens} of {self.num_prompt_tokens} tokens), "
            f"{self.num_short} short, {self.num_aborted} aborted, {len(self.mismatches)} mismatches"
        )
