"""Where a prompt can be resumed, against a search of all possibilities. Needs no torch."""

import random
from collections.abc import Sequence

import pytest

from kvtier.clients.transformers.plan import MAX_ATTEMPTS, LayerKind, resume_point, whole_blocks

BLOCK_TOKENS = 4


def kind(window_tokens: int = 0) -> LayerKind:
    return LayerKind((0,), 1, 8, 8, "float32", window_tokens)


class Store:
    """Which blocks of one chain are stored, per kind; counts the questions."""

    def __init__(self, blocks: Sequence[set[int]]) -> None:
        self.blocks = blocks
        self.num_questions = 0

    def __call__(self, number: int, first: int, end: int) -> int:
        assert first < end, "an empty question"
        self.num_questions += 1
        return next(
            (i for i, block in enumerate(range(first, end)) if block not in self.blocks[number]), end - first
        )


def possible(kinds: Sequence[LayerKind], store: Store, end: int) -> bool:
    """Whether every token that resuming after `end` blocks needs is stored, token by token."""
    for number, one in enumerate(kinds):
        last = end * BLOCK_TOKENS
        first = max(0, last - one.window_tokens) if one.window_tokens else 0
        if any(token // BLOCK_TOKENS not in store.blocks[number] for token in range(first, last)):
            return False
    return True


@pytest.mark.parametrize("seed", range(200))
def test_the_resume_point_is_the_best_possible(seed: int) -> None:
    choice = random.Random(seed)
    kinds = [kind(choice.choice([0, 0, 3, 4, 5, 9, 20])) for _ in range(choice.randint(1, 3))]
    num_blocks, align = choice.randint(0, 20), choice.choice([1, 1, 2, 4]) * BLOCK_TOKENS
    density = choice.choice([0.7, 0.95, 1.0])
    store = Store([{b for b in range(num_blocks) if choice.random() < density} for _ in kinds])
    found = resume_point(kinds, num_blocks, BLOCK_TOKENS, align, store)
    ends = [end for end in range(num_blocks + 1) if end * BLOCK_TOKENS % align == 0]
    assert found == max(end for end in ends if possible(kinds, store, end))


def test_whole_pasts_cost_one_question_each() -> None:
    store = Store([set(range(1000))] * 2)
    assert resume_point([kind(), kind()], 1000, BLOCK_TOKENS, BLOCK_TOKENS, store) == 1000
    assert store.num_questions == 2


def test_the_number_of_questions_is_bounded() -> None:
    store = Store([set()])
    assert resume_point([kind(window_tokens=3)], 4096, BLOCK_TOKENS, BLOCK_TOKENS, store) == 0
    assert store.num_questions == MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("num_tokens", "align_tokens", "expected"),
    [(0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2), (17, 16, 4), (16, 16, 0), (33, 16, 8)],
)
def test_the_last_token_is_never_from_a_store(num_tokens: int, align_tokens: int, expected: int) -> None:
    assert whole_blocks(num_tokens, BLOCK_TOKENS, align_tokens) == expected
