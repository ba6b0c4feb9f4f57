"""Workloads that no policy was made for: small traces of one habit each, seeded.

Every request is a chain of names; a chain is named by what it begins with, so that two chains share a
beginning when their parts do. What each of them is meant to break stands in its docstring.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import TypeAlias

from kvtier.appliance.replay.traces import Trace, TraceBuilder, TraceNamespace

BLOCK_TOKENS = 16
Request: TypeAlias = tuple[float, list[tuple[object, ...]]]  # seconds, chain


def chain_of(*parts: tuple[object, int]) -> list[tuple[object, ...]]:
    """Return the names of a chain of parts, each (name, number of blocks)."""
    chain: list[tuple[object, ...]] = []
    path: tuple[object, ...] = ()
    for part, num_blocks in parts:
        path = (*path, part)
        chain += [(*path, number) for number in range(num_blocks)]
    return chain


def zipf_weights(num: int, exponent: float) -> list[float]:
    """Return cumulated weights of ranks."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(num)))


def arrivals(rng: Random, num: int, gap_s: float) -> Iterator[float]:
    """Yield times of a Poisson process."""
    now = 0.0
    for _ in range(num):
        now += rng.expovariate(1 / gap_s)
        yield now


def zipf(rng: Random, num: int) -> Iterator[Request]:
    """Documents of a fixed popularity, independent of each other: frequency is all there is to know."""
    weights = zipf_weights(1500, 0.9)
    for now in arrivals(rng, num, 1.0):
        document = rng.choices(range(1500), cum_weights=weights)[0]
        yield now, chain_of((document, 2 + document % 5))


def popular(rng: Random, num: int) -> Iterator[Request]:
    """As above, and half of the requests are never seen again: LFU's own."""
    weights = zipf_weights(400, 0.7)
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        if number % 2:
            yield now, chain_of((("once", number), 5))
        else:
            yield now, chain_of((rng.choices(range(400), cum_weights=weights)[0], 5))


def recent(rng: Random, num: int) -> Iterator[Request]:
    """What was used lately is used again, whatever it is: LRU's own."""
    stack: list[int] = []
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        depth = int(rng.expovariate(1 / 60))
        document = stack.pop(-1 - depth) if depth < len(stack) and rng.random() < 0.85 else number
        stack.append(document)
        yield now, chain_of((document, 4))


def loop(rng: Random, num: int) -> Iterator[Request]:
    """The same documents in the same order, over and over: the worst that can happen to LRU."""
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        yield now, chain_of((number % 400, 4))


def scan(rng: Random, num: int) -> Iterator[Request]:
    """A small set in use, and long scans through what nobody needs again."""
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        if number // 100 % 3 == 2:
            yield now, chain_of((("scan", number), 8))
        else:
            yield now, chain_of((int(rng.expovariate(1 / 40)), 4))


def prefixes(rng: Random, num: int) -> Iterator[Request]:
    """A tree of shared beginnings with a question of one's own behind each."""
    weights = zipf_weights(6, 1.0)
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        branches = [rng.choices(range(6), cum_weights=weights)[0] for _ in range(4)]
        parts = [((depth, branch), 2) for depth, branch in enumerate(branches)]
        yield now, chain_of(*parts, (number, 2))


def chats(rng: Random, num: int, gap_s: float = 60.0) -> Iterator[Request]:
    """Conversations that grow, in bursts; most end after a turn or two."""
    turns: list[tuple[float, int, int]] = []
    begin_s = 0.0
    conversation = 0
    while len(turns) < num:
        begin_s += rng.expovariate(1 / 3)
        now, length = begin_s, 0
        for _ in range(1 + int(rng.expovariate(1 / 2))):
            length += 1 + int(rng.expovariate(1 / 3))
            turns.append((now, conversation, length))
            now += rng.lognormvariate(math.log(gap_s), 0.8)
        conversation += 1
    for now, number, length in sorted(turns)[:num]:
        yield now, chain_of(("system", 2), (number, length))


def shifting(rng: Random, num: int) -> Iterator[Request]:
    """Popular documents, and others every ten minutes: what was learned of frequency is wrong then."""
    weights = zipf_weights(300, 0.8)
    for now in arrivals(rng, num, 1.0):
        document = rng.choices(range(300), cum_weights=weights)[0]
        yield now, chain_of(((int(now // 600), document), 4))


def turncoat(rng: Random, num: int) -> Iterator[Request]:
    """First only what is old returns, then only what is young, and so on: no habit lasts."""
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        is_young = number // 800 % 2
        lag = 25 if is_young else 220
        document = number if number % 2 or number < lag else (number - lag) | 1
        yield now, chain_of((document, 4))


def twice(rng: Random, num: int) -> Iterator[Request]:
    """Everything is asked for twice, after any time: whoever waits for proof is too late."""
    waiting: list[tuple[float, int]] = []
    for number, now in enumerate(arrivals(rng, num, 1.0)):
        waiting.sort()
        if waiting and waiting[0][0] <= now:
            yield now, chain_of((waiting.pop(0)[1], 4))
        else:
            waiting.append((now + rng.lognormvariate(math.log(120), 1.2), number))
            yield now, chain_of((number, 4))


def converse(
    rng: Random, begin_s: float, beginning: Sequence[tuple[object, int]], name: object, num_turns: int
) -> Iterator[Request]:
    """Yield the turns of a conversation that begins with these parts; people take a minute or so."""
    now, length = begin_s, 0
    for _ in range(num_turns):
        length += 1 + int(rng.expovariate(1 / 2))
        yield now, chain_of(*beginning, (name, length))
        now += rng.lognormvariate(math.log(60.0), 0.8)


def documents(rng: Random, num: int) -> Iterator[Request]:
    """Questions about documents of a fixed popularity, and more questions about the answer."""
    weights = zipf_weights(250, 0.9)
    requests: list[Request] = []
    for number, begin_s in enumerate(arrivals(rng, num, 2.0)):
        document = rng.choices(range(250), cum_weights=weights)[0]
        beginning = [("system", 2), (document, 3 + document % 7)]
        requests += converse(rng, begin_s, beginning, ("talk", number), 1 + int(rng.expovariate(0.8)))
    yield from sorted(requests)[:num]


def branching(rng: Random, num: int) -> Iterator[Request]:
    """Agents whose steps grow a chain, and who send others off from where they are: trees of chains."""
    requests: list[Request] = []

    def work(now: float, parts: list[tuple[object, int]], depth: int) -> float:
        """One agent from now on. Returns when it is done."""
        name, length = ("agent", rng.random()), 0
        for _ in range(2 + int(rng.expovariate(1 / (12 >> depth)))):
            length += 1 + rng.randrange(3)
            requests.append((now, chain_of(*parts, (name, length))))
            pause_s = rng.lognormvariate(math.log(200.0), 1.0) if rng.random() < 0.1 / (1 + depth) else 0.0
            now += rng.expovariate(1 / 8) + pause_s
            if depth < 3 and rng.random() < 0.2:
                sent_off = [
                    work(now, [*parts, (name, length)], depth + 1) for _ in range(1 + rng.randrange(3))
                ]
                now = max(sent_off) + 1.0
        return now

    for begin_s in arrivals(rng, num // 20, 15.0):
        work(begin_s, [("tools", 5), (rng.randrange(8), 2)], 0)
    yield from sorted(requests)[:num]


def diurnal(rng: Random, num: int) -> Iterator[Request]:
    """People by day, ten times as many at noon; by night a job that reads the same reports every night."""
    requests: list[Request] = []
    day_s, now = 3000.0, 0.0
    for number in range(num):
        daylight = max(0.0, math.sin(2 * math.pi * now / day_s))
        now += rng.expovariate(0.1 + daylight)
        if daylight:
            beginning = [("system", 2)]
            requests += converse(rng, now, beginning, ("talk", number), 1 + int(rng.expovariate(0.6)))
        else:
            requests.append((now, chain_of(("report", 1), (rng.randrange(150), 5))))
    yield from sorted(requests)[:num]


def mixed(rng: Random, num: int) -> Iterator[Request]:
    """Conversations, and now and then a batch of prompts that nobody sends twice, as fast as it goes."""
    requests: list[Request] = []
    for number, begin_s in enumerate(arrivals(rng, num, 4.0)):
        requests += converse(rng, begin_s, [("system", 2)], ("talk", number), 1 + int(rng.expovariate(0.5)))
        if number % 150 == 149:
            requests += [
                (begin_s + 0.2 * item, chain_of(("batch", 2), ((number, item), 6))) for item in range(250)
            ]
    yield from sorted(requests)[:num]


def retrieval(rng: Random, num: int) -> Iterator[Request]:
    """Questions with a few passages in front, best one first: popular passages, in any company."""
    weights = zipf_weights(400, 1.0)
    for number, now in enumerate(arrivals(rng, num, 0.7)):
        found = dict.fromkeys(rng.choices(range(400), cum_weights=weights, k=1 + rng.randrange(3)))
        passages = [(("passage", each), 2 + each % 3) for each in found]
        yield now, chain_of(("instructions", 2), *passages, (("question", number), 1))


def few_shot(rng: Random, num: int) -> Iterator[Request]:
    """Jobs of many items behind one long prompt each, side by side; some prompts come again and again."""
    requests: list[Request] = []
    for number, begin_s in enumerate(arrivals(rng, num // 100, 60.0)):
        examples = ("nightly", number % 4) if rng.random() < 0.4 else ("job", number)
        now = begin_s
        for item in range(40 + rng.randrange(160)):
            now += rng.expovariate(2.0)
            requests.append((now, chain_of((examples, 12), ((number, item), 2))))
    yield from sorted(requests)[:num]


def completion(rng: Random, num: int) -> Iterator[Request]:
    """Editors that send a file up to the cursor at every pause: what stands before an edit stays the same."""
    requests: list[Request] = []
    for editor, begin_s in enumerate(arrivals(rng, num // 40, 40.0)):
        now, num_blocks, versions = begin_s, 8 + rng.randrange(24), [0] * 64
        for edit in range(20 + rng.randrange(60)):
            now += rng.expovariate(1 / 3) if rng.random() < 0.9 else rng.expovariate(1 / 120)
            cursor = min(num_blocks - 1, int(rng.expovariate(1 / 4)))
            place = num_blocks - 1 - cursor
            versions[place] = edit
            parts = [((editor, number, versions[number]), 1) for number in range(place + 1)]
            requests.append((now, chain_of(("instructions", 2), *parts)))
            num_blocks = min(60, num_blocks + (rng.random() < 0.2))
    yield from sorted(requests)[:num]


def subagents(rng: Random, num: int) -> Iterator[Request]:
    """Agents in a loop of tools; now and then some helpers read on from a brief, all at once, and report."""
    requests: list[Request] = []

    def loop_of(now: float, parts: list[tuple[object, int]], name: object, num_steps: int) -> float:
        length = 0
        for step in range(num_steps):
            length += 1 + int(rng.expovariate(1 / 2))
            requests.append((now, chain_of(*parts, (name, length))))
            now += 2.0 + (rng.expovariate(1 / 5) if rng.random() < 0.9 else rng.expovariate(1 / 180))
            if parts[0][0] == "agent" and rng.random() < 0.1:
                brief: list[tuple[object, int]] = [("helper", 3), ((name, step), 2)]
                ends = [
                    loop_of(now, brief, helper, 3 + rng.randrange(6))
                    for helper in range(2 + rng.randrange(4))
                ]
                now = max(ends)
        return now

    for number, begin_s in enumerate(arrivals(rng, num // 20, 20.0)):
        loop_of(begin_s, [("agent", 6)], number, 5 + int(rng.expovariate(1 / 15)))
    yield from sorted(requests)[:num]


def bursts(rng: Random, num: int) -> Iterator[Request]:
    """Customers of an API who come in bursts, each with a template or two and prompts of their own."""
    weights = zipf_weights(120, 0.8)
    requests: list[Request] = []
    for begin_s in arrivals(rng, num // 8, 10.0):
        customer = rng.choices(range(120), cum_weights=weights)[0]
        now = begin_s
        for _ in range(1 + int(rng.expovariate(1 / 12))):
            now += rng.expovariate(3.0)
            template = ((customer, int(rng.random() < 0.3)), 2 + customer % 6)
            requests.append((now, chain_of(template, (("prompt", rng.random()), 2))))
    yield from sorted(requests)[:num]


WORKLOADS: dict[str, Callable[[Random, int], Iterator[Request]]] = {
    each.__name__: each
    for each in (
        *(zipf, popular, recent, loop, scan, prefixes, chats, shifting, turncoat, twice),
        *(documents, branching, diurnal, mixed),
        *(retrieval, few_shot, completion, subagents, bursts),
    )
}


def trace_of(name: str, requests: Sequence[Request]) -> Trace:
    """Return these requests as a trace. No sessions: a policy has to find them by itself."""
    builder = TraceBuilder(name)
    builder.add_namespace(TraceNamespace(BLOCK_TOKENS))
    for at_s, chain in requests:
        num_blocks = len(chain)
        builder.add(
            at_s, chain, num_tokens=num_blocks * BLOCK_TOKENS, num_asked=num_blocks, num_filled=num_blocks
        )
    return builder.build()


def make(name: str, num_requests: int = 4000, seed: int = 1, time_scale: float = 1.0) -> Trace:
    """Return a workload by name, its time stretched by a factor (0: everything at once)."""
    requests = WORKLOADS[name](Random(seed), num_requests)
    return trace_of(name, [(at_s * time_scale, chain) for at_s, chain in requests])
