"""What an engine's listeners are told of blocks, as a real daemon stores, demotes and evicts them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clients.vllm.scheduler.lookups import LookupRequest

from ...waiting import until
from .announcing_scene import GROUP, HASHES, NAMES, Engine, demote, in_medium
from .engine import hashes_of


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def test_a_block_counts_when_both_ranks_have_it_until_one_has_not(engine: Engine) -> None:
    engine.put(0)
    engine.announce()
    engine.put(1, NAMES[:2])
    engine.until(in_medium("CPU", NAMES[:2]))
    engine.put(1, NAMES)
    engine.until(in_medium("CPU"))
    demote(engine)
    engine.evict("nvme")
    engine.until({})


def test_demotion_and_eviction_are_told(engine: Engine) -> None:
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    engine.until(in_medium("CPU"))
    demote(engine)
    engine.until(in_medium("STORAGE"))
    engine.evict("nvme")
    engine.until({})


def test_a_restart_is_heard_and_what_is_left_is_told_again(engine: Engine) -> None:
    for rank in (0, 1):
        engine.put(rank)
    engine.announce()
    engine.until(in_medium("CPU"))
    demote(engine)
    engine.until(in_medium("STORAGE"))
    engine.stop_daemon()
    engine.until({})
    engine.start_daemon()
    engine.until(in_medium("STORAGE"))
    engine.evict("nvme")
    engine.until({})


def test_what_was_stored_before_the_engine_came_is_announced_when_it_is_found(engine: Engine) -> None:
    """As after a restart of the engine: the request that finds blocks has their tokens."""
    for rank in (0, 1):
        engine.put(rank)
    demote(engine)
    asked = engine.agent.ask(LookupRequest("session", tuple(HASHES)))
    until(lambda: asked.answer is not None)
    assert asked.answer is not None
    engine.agent.release(asked)
    assert asked.answer.stored == (len(NAMES),)
    engine.announce(NAMES[: asked.answer.stored[0]])
    until(lambda: set(engine.hear()) == set(NAMES))


def test_blocks_that_were_evicted_before_they_were_announced_are_not(engine: Engine) -> None:
    for rank in (0, 1):
        engine.put(rank)
    demote(engine)
    engine.evict("nvme")
    engine.announce()
    other = GROUP.chain(hashes_of(range(100, 132)))
    for rank in (0, 1):
        engine.put(rank, other)
    engine.announce(other)
    engine.until(in_medium("CPU", other))
