"""The scheduler's agent on a new host: what another host stored counts as found, on all ranks and groups."""

import shutil
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest

from kvtier.clients import AsyncClient, Client
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.scheduler.agent import Agent
from kvtier.clients.vllm.scheduler.lookups import LookupRequest

from ...daemon import PATIENT, Daemon
from ...e2e.test_shared_store import bundles, host
from ...waiting import until
from .engine import hashes_of
from .threads_scene import identities

BLOCK_TOKENS = 16  # one hash each; 16 blocks a bundle
BUNDLE = 256 // BLOCK_TOKENS
HASHES = tuple(hashes_of(range(4 * (3 * BUNDLE + 1))))
FULL = Group(0, BLOCK_TOKENS, 1)
ONE, WINDOWED = [FULL], [FULL, Group(1, BLOCK_TOKENS, 1, window_tokens=40)]
OPTIONS = Options(target="given", answer_timeout_s=120.0, promote_timeout_s=600.0)


def put(daemon: Daemon, groups: list[Group], rank: int, num_bundles: int) -> None:
    """Store the first bundles of the chain, of every group of a rank, and one block more."""
    with Client(daemon.target, timeout=PATIENT) as client:
        for identity in identities(groups, rank):
            names = list(HASHES[: num_bundles * BUNDLE + 1])
            data = np.zeros(len(names) * identity.geometry.block_bytes, np.uint8)
            assert client.put(client.register(identity), names, data).complete


@pytest.mark.parametrize("groups", [ONE, WINDOWED], ids=["one group", "with a window"])
def test_all_ranks_load_what_all_of_them_can_fetch(tmp_path: Path, groups: list[Group]) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with host(tmp_path / "first", f"file://{store}", "eager") as first:
        put(first, groups, 0, 3)
        num_written = 3 * len(groups)
        put(first, groups, 1, 2)
        num_written += 2 * len(groups)
        until(lambda: sum("#" not in one.name for one in store.glob("v1/b/*/*/*/*")) == num_written)
        first.stop(SIGKILL)
    shutil.rmtree(tmp_path / "first" / "nvme")
    assert bundles(store)
    with host(tmp_path / "second", f"file://{store}", "off") as second:
        agent = Agent(
            OPTIONS,
            groups,
            [identities(groups, rank) for rank in (0, 1)],
            lambda: AsyncClient(second.target, timeout=PATIENT),
            Counters(),
        )
        asked = agent.ask(LookupRequest("session", HASHES, deadline_s=600.0))
        until(lambda: asked.answer is not None)
        assert asked.answer is not None
        assert asked.answer.num_tokens == 2 * BUNDLE * BLOCK_TOKENS
        agent.release(asked)
        agent.close()
