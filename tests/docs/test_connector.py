"""examples/connector.py under a small engine whose KV is a function of the tokens: what a load brings is what
a prefill would have computed, or is not claimed. Against the fake and a real daemon."""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from examples import connector
from examples.connector import Request, SchedulerSide, WorkerSide
from kvtier.clients import Client, Geometry, KvtierError, NamespaceIdentity, Overloaded
from kvtier.testing import ConnectorCheck, FakeAppliance, connector_checks

from ..daemon import Daemon

GEOMETRY = Geometry(
    num_layers=5, num_kv_heads=2, head_dim=16, block_tokens=8, dtype="float16", layers_per_group=2
)
NUM_PAGES, NUM_RANKS, PROMPT = 32, 2, list(range(61))
NEVER_A_PAGE = 255


class Engine:
    """An engine of two ranks. What it computes for a block follows from the block's name, layer and rank."""

    def __init__(self, make_client: Callable[[], Client], model: str) -> None:
        digest = hashlib.sha256(model.encode()).digest()
        ranks = [NamespaceIdentity(digest, GEOMETRY, shard=f"tp={rank}/2") for rank in range(NUM_RANKS)]
        shape = (GEOMETRY.num_layers, NUM_PAGES, GEOMETRY.layer_bytes)
        self.scheduler = SchedulerSide(make_client(), ranks)
        self.workers = [
            WorkerSide(make_client(), rank, np.full(shape, NEVER_A_PAGE, np.uint8)) for rank in ranks
        ]
        self.groups: list[int] = []

    def prefill(self, tokens: list[int], session: str = "anna") -> int:
        """Serve a prompt; return how many of its tokens were not computed."""
        request = Request(tokens, session)
        num_matched = self.scheduler.match(request) // GEOMETRY.block_tokens
        table = np.random.default_rng(len(tokens)).permutation(NUM_PAGES)[: len(request.hashes)].tolist()
        num_loaded = num_matched and min(
            worker.load(request, table[:num_matched], self.groups.append) for worker in self.workers
        )
        self.scheduler.loaded(request)
        for rank, worker in enumerate(self.workers):
            for block, page in enumerate(table):
                computed = kv_of(request.hashes[block], rank)
                if block < num_loaded:
                    np.testing.assert_array_equal(worker.pages[:, page], computed)
                worker.pages[:, page] = computed
            worker.save(request, table, num_loaded)
        self.scheduler.finished(request, back_in_s=30.0)
        return num_loaded * GEOMETRY.block_tokens


def kv_of(name: bytes, rank: int) -> npt.NDArray[np.uint8]:
    seed = np.frombuffer(name + bytes([rank]) + bytes(3), np.uint32)
    return np.random.default_rng(seed).integers(0, 200, (GEOMETRY.num_layers, GEOMETRY.layer_bytes), np.uint8)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a daemon that is too slow is a miss is not asked here."""
    monkeypatch.setattr(connector, "CALL_S", 60.0)


@pytest.fixture(params=["fake", "daemon", "daemon without shared memory"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[[], Client]]:
    made: list[Client] = []
    if request.param == "fake":
        appliance = FakeAppliance()
        yield appliance.client
        assert appliance.check_integrity() == []
        return
    daemon: Daemon = request.getfixturevalue("shared_daemon")
    shared_memory = None if request.param == "daemon" else False

    def client() -> Client:
        made.append(Client(daemon.target, shared_memory=shared_memory))
        return made[-1]

    yield client
    for one in made:
        one.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest, make_client: Callable[[], Client]) -> Engine:
    return Engine(make_client, request.node.name)


def test_the_next_turn_computes_what_is_new(engine: Engine) -> None:
    assert engine.prefill(PROMPT) == 0
    assert engine.prefill(PROMPT) == 56  # of 61: whole blocks, and never the last token
    assert engine.prefill(PROMPT + list(range(40))) == 56
    assert engine.prefill(PROMPT + list(range(40))) == 96
    assert engine.prefill(PROMPT[:56]) == 48  # seven whole blocks are stored
    assert engine.prefill([9, *PROMPT]) == 0
    guards = [engine.scheduler.guard, *(worker.guard for worker in engine.workers)]
    assert [guard.causes for guard in guards] == [{}] * 3


def test_layer_groups_come_in_order(engine: Engine) -> None:
    engine.prefill(PROMPT)
    engine.prefill(PROMPT)
    assert engine.groups == [0, 1, 2] * NUM_RANKS


def test_a_prompt_shorter_than_a_block_is_no_question(engine: Engine) -> None:
    assert engine.prefill([1, 2, 3]) == 0
    assert engine.scheduler.guard.causes == {}


def test_ranks_agree_on_what_all_of_them_have(engine: Engine) -> None:
    request = Request(PROMPT, "anna")
    engine.scheduler.match(request)
    for rank, worker in enumerate(engine.workers):
        for page, name in enumerate(request.hashes):
            worker.pages[:, page] = kv_of(name, rank)
        num_blocks = 7 - 3 * rank  # rank 1 has stored less
        assert worker.save(request, list(range(num_blocks))) == num_blocks
    assert engine.scheduler.match(Request(PROMPT, "anna")) == 4 * GEOMETRY.block_tokens
    assert engine.prefill(PROMPT) == 4 * GEOMETRY.block_tokens


@pytest.fixture
def appliance() -> FakeAppliance:
    return FakeAppliance()


def test_a_dead_daemon_is_a_miss_and_its_return_is_noticed(appliance: FakeAppliance) -> None:
    engine = Engine(appliance.client, "dead")
    engine.prefill(PROMPT)
    appliance.unavailable = True
    assert engine.prefill(PROMPT) == 0
    assert "BREAKER_OPEN" in engine.scheduler.guard.causes
    appliance.unavailable = False
    again = Engine(appliance.client, "dead")  # a breaker of its own: nothing waits for a pause here
    assert again.prefill(PROMPT) == 56


def test_a_restarted_daemon_is_a_miss(appliance: FakeAppliance) -> None:
    engine = Engine(appliance.client, "restarted")
    engine.prefill(PROMPT)
    appliance.restart()
    assert engine.prefill(PROMPT) == 0
    assert engine.prefill(PROMPT) == 56


def test_a_full_daemon_stores_nothing_and_stops_nobody(appliance: FakeAppliance) -> None:
    engine = Engine(appliance.client, "full")
    request = Request(PROMPT, "anna")
    engine.scheduler.match(request)
    appliance.fail_next(Overloaded("no room", reason="TIER_FULL"))
    worker = engine.workers[0]
    assert worker.save(request, list(range(7))) == 0
    assert worker.guard.causes == {"TIER_FULL": 1}
    assert worker.save(request, list(range(7))) == 7


def test_what_is_matched_cannot_be_evicted_before_it_is_loaded(appliance: FakeAppliance) -> None:
    engine = Engine(appliance.client, "evicted")
    engine.prefill(PROMPT)
    request = Request(PROMPT, "anna")
    assert engine.scheduler.match(request) == 56
    assert appliance.evict_all() == 0
    engine.scheduler.loaded(request)
    assert appliance.evict_all() == 14
    assert engine.workers[0].load(request, list(range(7))) == 0


def test_a_lease_that_has_ended_promises_nothing() -> None:
    now = 0.0
    appliance = FakeAppliance(clock=lambda: now)
    engine = Engine(appliance.client, "ended")
    engine.prefill(PROMPT)
    request = Request(PROMPT, "anna")
    assert engine.scheduler.match(request) == 56
    now = connector.LEASE_S + 1.0
    engine.scheduler.finished(Request([1], "ben"))  # the fake notices the time when it is asked
    assert appliance.evict_all() == 14
    assert [worker.load(request, list(range(7))) for worker in engine.workers] == [0, 0]
    engine.scheduler.loaded(request)  # releasing it late is harmless
    assert appliance.check_integrity() == []


def test_nothing_is_held_when_all_is_done(engine: Engine) -> None:
    engine.prefill(PROMPT)
    engine.prefill(PROMPT)
    request = Request(PROMPT, "anna")
    engine.scheduler.match(request)
    engine.scheduler.finished(request, is_last=True)
    assert request.leases == []


class Served:
    """The example under its engine, as the kit wants it."""

    def __init__(self, make_client: Callable[[], Client]) -> None:
        self.engine = Engine(make_client, "kit")

    def serve(self, tokens: Sequence[int], session: str) -> int:
        return self.engine.prefill(list(tokens), session)


@pytest.mark.parametrize("check", connector_checks(Served, block_tokens=GEOMETRY.block_tokens), ids=str)
def test_the_example_passes_the_kit(check: ConnectorCheck) -> None:
    check()


class Boastful(Served):
    """Claims the last token, too."""

    def serve(self, tokens: Sequence[int], session: str) -> int:
        found = super().serve(tokens, session)
        return len(tokens) // GEOMETRY.block_tokens * GEOMETRY.block_tokens if found else 0


class Fragile(Served):
    """Lets errors of its scheduler's client out."""

    def __init__(self, make_client: Callable[[], Client]) -> None:
        super().__init__(make_client)
        self._client = make_client()

    def serve(self, tokens: Sequence[int], session: str) -> int:
        self._client.info  # noqa: B018
        return super().serve(tokens, session)


class Forgetful(Served):
    """Never releases what it matched."""

    def serve(self, tokens: Sequence[int], session: str) -> int:
        self.engine.scheduler.match(Request(list(tokens), session))
        return super().serve(tokens, session)


@pytest.mark.parametrize("broken", [Boastful, Fragile, Forgetful])
def test_the_kit_finds_what_is_broken(broken: type[Served]) -> None:
    failed = 0
    for check in connector_checks(broken, block_tokens=GEOMETRY.block_tokens):
        try:
            check()
        except (AssertionError, KvtierError):
            failed += 1
    assert failed
