"""Recurrent state: found and pinned for one place, saved by name, loaded with the rest or not at all."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.clients import PreconditionFailed
from kvtier.clients.vllm.groups import NULL_BLOCK, Group
from kvtier.clients.vllm.plan import StepPlan, part_of
from kvtier.clients.vllm.scheduler.finding import Finder, FoundPrefix
from kvtier.clients.vllm.scheduler.lookups import LookupRequest
from kvtier.clients.vllm.worker.pages import LayerView, PagedGroup

from .scheduler_scene import GROUPS, Scene, request

CHAIN, STATE = Group(0, 16, 1), Group(1, 16, 1, is_recurrent=True)
HASHES = tuple(bytes([n]) * 32 for n in range(1, 9))


class Store:
    """A client of one rank: a chain of so many blocks, and states at some ends."""

    def __init__(self, num_blocks: int, ends: set[int], lost: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.num_blocks = num_blocks
        self.names = {HASHES[end // 16 - 1] for end in ends}
        self.lost = {HASHES[end // 16 - 1] for end in lost}  # gone between lookup and acquire
        self.pinned: list[tuple[str, list[bytes]]] = []

    async def lookup(self, namespace: str, chain: list[bytes]) -> Any:
        if namespace == "state":
            return SimpleNamespace(num_blocks=int(chain[0] in self.names))
        number = min(self.num_blocks, len(chain))
        return SimpleNamespace(num_blocks=number, num_available=number, search_s=0.0)

    async def acquire(self, namespace: str, chain: list[bytes], **_: Any) -> Any:
        self.pinned.append((namespace, chain))
        is_there = namespace == "chain" or chain[0] not in self.lost
        number = len(chain) if is_there else 0
        return SimpleNamespace(num_blocks=number, num_stored=number, reason="", tiers=())


def find(store: Store, max_tokens: int = 1 << 62, first_token: int = 0) -> FoundPrefix:
    finder, found = Finder(store, [CHAIN, STATE], ttl_s=30.0, search_wait_s=0.0), FoundPrefix()  # type: ignore[arg-type]
    question = LookupRequest("s", HASHES, first_token, max_tokens=max_tokens)
    asyncio.run(finder.pin([["chain", "state"]], question, found))  # type: ignore[list-item]
    return found


def test_the_last_state_within_the_chain_is_the_hit() -> None:
    store = Store(6, {32, 64, 128})
    assert find(store).num_tokens == 64
    assert store.pinned == [("chain", list(HASHES[:4])), ("state", [HASHES[3]])]


def test_no_state_no_hit() -> None:
    assert find(Store(8, set())).num_tokens == 0
    assert find(Store(8, {32}), first_token=32).num_tokens == 0


def test_a_state_is_not_found_where_a_token_must_still_be_computed() -> None:
    assert find(Store(8, {112, 128}), max_tokens=127).num_tokens == 112


def test_a_state_that_is_gone_when_it_is_pinned_ends_the_hit() -> None:
    assert find(Store(8, {64}, lost={64})).num_tokens == 0


class WindowStore:
    """A client of several ranks: a whole chain, and some blocks of a window's group on each."""

    def __init__(self, *ranks: set[int]) -> None:
        self.names = [{HASHES[block] for block in blocks} for blocks in ranks]
        self.num_lookups = 0
        self.pinned: list[list[bytes]] = []

    async def lookup(self, namespace: tuple[str, int], chain: list[bytes]) -> Any:
        self.num_lookups += 1
        kind, rank = namespace
        there = [kind == "chain" or name in self.names[rank] for name in [*chain, b""]][: len(chain)]
        number = [*there, False].index(False)
        return SimpleNamespace(num_blocks=number, num_available=number, search_s=0.0)

    async def acquire(self, namespace: tuple[str, int], chain: list[bytes], **_: Any) -> Any:
        if namespace[0] == "window":
            self.pinned.append(chain)
        number = (await self.lookup(namespace, chain)).num_blocks
        return SimpleNamespace(num_blocks=number, num_stored=number, reason="", tiers=())


@pytest.mark.parametrize(
    ("ranks", "expected", "first_token"),
    [
        (({2, 3, 6, 7},), 128, 0),
        (({2, 3, 7},), 64, 0),  # the window before 128 has lost a block
        (({2, 3, 6, 7}, {2, 3, 6}), 64, 0),  # on one rank
        (({0, 1, 5}, {5, 6}), 0, 0),
        (({0, 1, 2}, {1, 2}), 48, 0),
        (({7},), 128, 112),  # the engine has block 6 itself
        ((set[int](),), 0, 0),
    ],
)
def test_windows_at_checkpoints_are_found_where_they_are_whole(
    ranks: tuple[set[int], ...], expected: int, first_token: int
) -> None:
    window = Group(1, 16, 1, window_tokens=20, checkpoint_tokens=64)
    store, found = WindowStore(*ranks), FoundPrefix()
    finder = Finder(store, [CHAIN, window], ttl_s=30.0, search_wait_s=0.0)  # type: ignore[arg-type]
    namespaces: Any = [[("chain", rank), ("window", rank)] for rank in range(len(ranks))]
    asyncio.run(finder.pin(namespaces, LookupRequest("s", HASHES, first_token), found))
    assert found.num_tokens == expected
    if expected:
        first = max(first_token, expected - 32) // 16
        assert store.pinned == [list(HASHES[first : expected // 16])] * len(ranks)
        assert found.stored == (8, expected // 16)
    assert store.num_lookups <= 24


def test_which_blocks_of_windows_are_kept() -> None:
    """Windows of 20 tokens that end at 64 and 128, and all from the one on in which a prompt of 150 ends."""
    window = Group(1, 16, 1, window_tokens=20, checkpoint_tokens=64)
    assert [n for n in range(12) if window.is_kept(n, 144)] == [2, 3, 6, 7, 8, 9, 10, 11]
    wide = Group(1, 16, 1, window_tokens=100, checkpoint_tokens=64)
    assert all(wide.is_kept(n, 144) for n in range(12)), "windows that overlap"
    part = part_of(window, HASHES, [NULL_BLOCK, NULL_BLOCK, 7, 8], 0, 64)
    assert part is not None
    assert (part.hashes, part.first_block, part.block_ids) == (b"".join(HASHES[2:4]), 0, [7, 8])


def test_a_load_has_the_state_of_its_end_and_no_other() -> None:
    part = part_of(STATE, HASHES, [NULL_BLOCK, NULL_BLOCK, 7], 0, 48)
    assert part is not None
    assert (part.hashes, part.first_block, part.block_ids) == (HASHES[2], 0, [7])
    with pytest.raises(ValueError, match="no place for the state at token 48"):
        part_of(STATE, HASHES, [NULL_BLOCK] * 3, 0, 48)


def test_states_are_saved_by_name_and_once() -> None:
    block = GROUPS[0].block_tokens
    group = Group(1, block, GROUPS[0].hashes_per_block, is_recurrent=True)
    scene = Scene(groups=[GROUPS[0], group])
    one = request()
    scene.side.arrived(one)
    offered = {one.request_id: [(1, 9, 2 * block), (1, 8, block + 1), (0, 7, block), (1, NULL_BLOCK, block)]}

    def plan() -> StepPlan:
        made = StepPlan()
        scene.side.plan(made, {}, lambda _: None, lambda: offered)
        return made

    (save,) = plan().saves
    name = group.name_of(one.block_hashes, 2 * block)
    assert (save.group, save.parent, save.hashes, save.block_ids) == (1, b"", name, [9])
    assert scene.held.blocks == [9]
    assert plan().saves == []


def test_the_last_token_is_never_part_of_a_state_that_is_asked_for() -> None:
    group = Group(1, GROUPS[0].block_tokens, GROUPS[0].hashes_per_block, is_recurrent=True)
    for groups, less in (([*GROUPS], 0), ([GROUPS[0], group], 1)):
        scene = Scene(groups=groups)
        one = request()
        scene.side.arrived(one)
        assert scene.agent.asked[-1].question.max_tokens == one.num_tokens - less


class Part:
    """A tensor as the engine makes them of a page: `offset` bytes into it."""

    def __init__(self, page: Any, offset: int, num_bytes: int) -> None:
        self._view = page[:, offset : offset + num_bytes]

    def data_ptr(self) -> int:
        return int(self._view.ctypes.data)

    def stride(self, axis: int) -> int:
        return int(self._view.strides[axis])

    def element_size(self) -> int:
        return 1

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: int) -> Any:
        row = self._view[index]
        return SimpleNamespace(is_contiguous=lambda: True, numel=lambda: row.size, element_size=lambda: 1)


def test_the_parts_of_a_state_are_one_run_of_bytes_in_a_page() -> None:
    page = np.zeros((5, 100), np.uint8)
    view = LayerView.of_layer([Part(page, 0, 24), Part(page, 24, 40)])
    group = PagedGroup([view], 5)
    assert (group.block_bytes, group.piece_bytes, view.strides) == (64, 64, (100, 1))
    with pytest.raises(PreconditionFailed, match="side by side"):
        LayerView.of_layer([Part(page, 0, 24), Part(page, 30, 40)])
