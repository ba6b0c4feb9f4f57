"""Random requests through a whole engine's life: never wrong KV, nothing held for ever, whatever fails."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvtier.clients.errors import Overloaded, Unavailable
from kvtier.clients.vllm.groups import Group
from kvtier.testing import FakeAppliance

from .engine import HASH_TOKENS, Request
from .simulation import Simulation

FULL = [Group(0, 8, 8 // HASH_TOKENS)]
HYBRID = [Group(0, 8, 8 // HASH_TOKENS), Group(1, 4, 4 // HASH_TOKENS, window_tokens=10)]
CHECKPOINTS = [HYBRID[0], replace(HYBRID[1], checkpoint_tokens=32)]
SEEDS = range(3)


def request(number: int, randomly: random.Random) -> Request:
    """A prompt that begins as others do."""
    shared = [(7 * i + randomly.randrange(3)) % 500 if i % 64 == 63 else i for i in range(96)]
    tokens = shared[: randomly.randrange(97)] + [
        randomly.randrange(500) for _ in range(randomly.randrange(1, 40))
    ]
    salt = randomly.choice(["", "", "tenant"])
    made = Request(f"r{number}", tokens, len(tokens), salt)
    made.max_tokens = len(tokens) + randomly.randrange(1, 24)
    return made


@pytest.fixture
def appliance() -> Iterator[FakeAppliance]:
    made = FakeAppliance(capacity_bytes=8 << 20)
    yield made
    assert made.check_integrity() == []


@pytest.fixture
def simulate(appliance: FakeAppliance) -> Iterator[Callable[..., Simulation]]:
    with ExitStack() as stack:

        def make(groups: list[Group], seed: int, **settings: Any) -> Simulation:
            made = Simulation(groups, appliance, random.Random(seed), **settings)
            stack.callback(made.close)
            return made

        yield make


def run(simulation: Simulation, num_requests: int, between: object = None) -> None:
    randomly = simulation.random
    for number in range(num_requests):
        simulation.add(request(number, randomly))
        for _ in range(randomly.randrange(4)):
            simulation.step(
                answers=randomly.random() < 0.7, loads=randomly.random() < 0.6, saves=randomly.random() < 0.5
            )
        if randomly.random() < 0.1 and simulation.requests:
            alive = [one for one in simulation.requests.values() if one.state != "aborted"]
            if alive:
                simulation.abort(randomly.choice(alive))
        if callable(between):
            between(number)
    simulation.drain()


def assert_nothing_is_left(simulation: Simulation) -> None:
    assert simulation.agent.num_pinned == 0
    assert simulation.pool.num_free == len(simulation.pool.references) - 1
    assert not simulation.scheduler.is_busy


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("groups", "prefix_caching"),
    [(FULL, True), (FULL, False), (HYBRID, False), (CHECKPOINTS, False)],
    ids=["apc", "no-apc", "hybrid", "checkpoints"],
)
def test_random_lives(
    simulate: Callable[..., Simulation], groups: list[Group], prefix_caching: bool, seed: int
) -> None:
    simulation = simulate(groups, seed, prefix_caching=prefix_caching)
    run(simulation, 30)
    assert simulation.num_hit_tokens > 0 or prefix_caching
    assert simulation.totals["save_blocks_stored"] > 0
    assert_nothing_is_left(simulation)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("groups", [FULL, HYBRID, CHECKPOINTS], ids=["full", "hybrid", "checkpoints"])
def test_random_lives_beside_an_appliance_that_fails(
    simulate: Callable[..., Simulation], appliance: FakeAppliance, groups: list[Group], seed: int
) -> None:
    """It is full, forgets, breaks off, and comes back; the engine's requests all end."""
    simulation = simulate(groups, seed, prefix_caching=False)
    randomly = simulation.random

    def trouble(number: int) -> None:
        match randomly.randrange(8):
            case 0:
                appliance.evict_all()
            case 1:
                appliance.restart()
            case 2:
                appliance.unavailable = not appliance.unavailable
            case 3:
                appliance.fail_next(Overloaded("full", reason="TIER_FULL"), 2)
            case 4:
                appliance.fail_next(Unavailable("gone", reason="CONNECTION_LOST"), 3)

    run(simulation, 30, trouble)
    appliance.unavailable = False
    assert_nothing_is_left(simulation)
    assert appliance.check_integrity() == []


def test_second_engine_finds_what_the_first_one_stored(simulate: Callable[..., Simulation]) -> None:
    for _ in range(2):
        simulation = simulate(FULL, 1)
        for number in range(5):
            made = Request(f"r{number}", list(range(100)), 100)
            made.max_tokens = 110
            simulation.add(made)
            simulation.drain()
            simulation.pool.cached.clear()
            simulation.pool.names.clear()
        stored, hits = simulation.totals.get("save_blocks_stored", 0), simulation.num_hit_tokens
        assert_nothing_is_left(simulation)
    assert stored == 0
    assert hits == 5 * 96


def test_one_copy_of_a_shared_prompt(simulate: Callable[..., Simulation]) -> None:
    """Many requests at the same time with one system prompt: each block is saved once."""
    simulation = simulate(FULL, 1, num_blocks=512, prefix_caching=False)
    simulation.agent.arriving_chance = 0.0  # an answer that is older than a save makes it be tried again
    for number in range(12):
        made = Request(f"r{number}", [*range(64), 400 + number], 65)
        made.max_tokens = 66
        simulation.add(made)
    simulation.drain()
    assert simulation.totals["save_blocks_stored"] == 8
    assert simulation.totals.get("save_blocks_deduplicated", 0) == 0
    assert_nothing_is_left(simulation)


def test_windows_at_checkpoints(simulate: Callable[..., Simulation]) -> None:
    """The next turn finds all of the one before it, a branch the last checkpoint before it leaves; most
    windows are not stored."""
    num_stored: list[float] = []
    hits: list[list[int]] = []
    for groups in (HYBRID, CHECKPOINTS):
        simulation = simulate(groups, 1, num_blocks=512, prefix_caching=False)
        found: list[int] = []
        salt = str(len(num_stored))
        turn, branch = list(range(150)), [*range(110), *range(300, 320)]
        for number, tokens in enumerate(([*turn], [*turn, *range(200, 230)], branch)):
            made = Request(f"r{number}", tokens, len(tokens), salt)
            made.max_tokens = len(tokens) + 8
            before = simulation.num_hit_tokens
            simulation.add(made)
            simulation.drain()
            found.append(simulation.num_hit_tokens - before)
            turn = made.tokens if number == 0 else turn
        num_stored.append(simulation.totals["save_blocks_stored"])
        hits.append(found)
        assert_nothing_is_left(simulation)
    assert hits == [[0, 144, 104], [0, 144, 96]]
    assert num_stored[1] < 0.75 * num_stored[0], "of both groups"
