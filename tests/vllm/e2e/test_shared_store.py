"""What one host computed, another one's engine serves from the object store, after the first is gone."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.process import EngineProcess, Output

from ...waiting import until
from .. import patience
from .comparison import difference, exact_difference
from .rig import SEED, SMALL, settled
from .traffic import Traffic

Ask = dict[str, object]
BUNDLE_TOKENS = 256
NUM_BUNDLES = 3  # of each prompt
NUM_LOCAL_TOKENS = 40  # behind them: never in the store
NUM_REST_TOKENS = 24  # behind them in the last prompt: less than a block, so that no cache has it
WHOLE, FLIPPED, GONE, EXACT = range(4)  # prompts


@contextmanager
def host(store: Path) -> Iterator[ApplianceProcess]:
    """Start a daemon with an empty disk that stores all it is given; wait until it uses the store."""
    settings = (f"object.url=file://{store}", "object.share=eager", "observe.http=off")
    with ApplianceProcess(settings=settings) as appliance:
        until(lambda: f"object store file://{store}: in use" in appliance.log.read_text())
        yield appliance


def bundles(store: Path) -> list[Path]:
    """Return the bundles in a store, whole ones only."""
    return [path for path in store.glob("v1/b/*/*/*/*") if "#" not in path.name]


def has_bundles(store: Path, number: int) -> bool:
    """Whether a store holds so many bundles."""
    return len(bundles(store)) == number


def num_fetched(appliance: ApplianceProcess) -> int:
    """Return how many blocks a daemon had from the store."""
    return appliance.status().counters["blocks_fetched"]


def test_an_engine_on_a_new_host_is_served_from_the_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    traffic = Traffic(SEED, SMALL.block_tokens, max_tokens=2000)
    asks: list[Ask] = [
        {"tokens": traffic.words(NUM_BUNDLES * BUNDLE_TOKENS + num_more), "num_new": 8}
        for num_more in (NUM_LOCAL_TOKENS, NUM_LOCAL_TOKENS, NUM_LOCAL_TOKENS, NUM_REST_TOKENS)
    ]
    expected: list[Output] = []
    written: list[set[Path]] = []
    with host(store) as first:
        options = replace(SMALL, connector=kvtier_connector(first.target, **patience.CONNECTOR))
        with EngineProcess(options, tmp_path, "first") as engine:
            for number, ask in enumerate(asks, 1):
                expected += engine.generate(ask)
                settled(engine, first)
                until(partial(has_bundles, store, number * NUM_BUNDLES))
                written.append(set(bundles(store)).difference(*written))
            (from_own_cache,) = engine.generate(asks[EXACT])
            assert from_own_cache.num_cached == NUM_BUNDLES * BUNDLE_TOKENS
        first.kill()
    assert not first.folder.exists(), "its disk is gone"
    for path in written[FLIPPED]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])

    with host(store) as second:
        options = replace(SMALL, connector=kvtier_connector(second.target, **patience.CONNECTOR))
        with EngineProcess(options, tmp_path, "second") as engine:
            (got,) = engine.generate(asks[WHOLE])
            assert got.num_cached == NUM_BUNDLES * BUNDLE_TOKENS
            assert not difference(expected[WHOLE], got)
            assert num_fetched(second) == NUM_BUNDLES * BUNDLE_TOKENS // SMALL.block_tokens
            counted = engine.metrics()
            assert counted["vllm:kvtier_hits"] == 1
            (got,) = engine.generate(asks[EXACT])
            assert got.num_cached == from_own_cache.num_cached
            assert not exact_difference(from_own_cache, got), "bits of vLLM's own cache on the first host"
            (got,) = engine.generate(asks[FLIPPED])
            assert not difference(expected[FLIPPED], got)
            shutil.rmtree(store)
            (got,) = engine.generate(asks[GONE])
            assert got.num_cached == 0
            assert not difference(expected[GONE], got)
            settled(engine, second)
            # What did not come from the store was computed and stored here.
            for which in (FLIPPED, GONE):
                engine.reset()
                (got,) = engine.generate(asks[which])
                assert got.num_cached > NUM_BUNDLES * BUNDLE_TOKENS
                assert not difference(expected[which], got)
        second.check_integrity()
