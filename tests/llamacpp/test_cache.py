"""The real llama.cpp with kvtier below it: equal tokens, longer prompts reuse shorter ones, trouble is a
miss."""

import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from kvtier.clients.llamacpp import KvtierCache, UnsupportedState

from ..daemon import Daemon
from .models import FIRST_TOKEN, VOCABULARY, make

BLOCK_TOKENS = 32


OPEN: list[Any] = []  # contexts and caches of a test


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def llama(model: Path, **settings: Any) -> Any:
    values = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}
    OPEN.append(llama_cpp.Llama(str(model), **{**values, **settings}))
    return OPEN[-1]


def with_kvtier(model: Path, target: str, **settings: Any) -> tuple[Any, KvtierCache]:
    """Return a fresh context, as a new process has it, with a cache."""
    llm = llama(model, **settings)
    cache = KvtierCache(llm, target, block_tokens=BLOCK_TOKENS)
    llm.set_cache(cache)
    OPEN.append(cache)
    return llm, cache


def words(seed: int, num: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(num)]


def answer(llm: Any, prompt: list[int], num_new: int = 12) -> list[int]:
    """Return the tokens of a greedy answer, by the call that users make. Words of the model are its
    numbers."""
    made = llm.create_completion(prompt, max_tokens=num_new, temperature=0.0)
    return [int(number) for number in re.findall(r"<x(\d+)>", made["choices"][0]["text"])]


def right(model: Path, prompt: list[int], **settings: Any) -> list[int]:
    """Return the answer of llama.cpp alone."""
    return answer(llama(model, **settings), prompt)


def test_the_size_of_a_context_counts_where_a_model_has_two_rope_factors(
    model: Path, tmp_path: Path, daemon: Daemon
) -> None:
    long_rope, prompt = make(tmp_path / "long.gguf", short_tokens=1024), words(1, 300)
    answers = {size: right(long_rope, prompt, n_ctx=size) for size in (1024, 2048)}
    assert answers[1024] != answers[2048], "the test shows nothing"
    for size in (1024, 2048):
        llm, cache = with_kvtier(long_rope, daemon.target, n_ctx=size)
        assert answer(llm, prompt) == answers[size]
        assert cache.num_hits == 0
    identities = [with_kvtier(model, daemon.target, n_ctx=size)[1].identity for size in (1024, 2048)]
    assert identities[0] == identities[1], "other models share, whatever the size"


@pytest.mark.parametrize("flash_attn", [False, True], ids=["values transposed", "flash attention"])
def test_a_new_process_continues_what_an_earlier_one_computed(
    model: Path, daemon: Daemon, flash_attn: bool
) -> None:
    prompt = words(1, 300)
    expected = right(model, prompt, flash_attn=flash_attn)
    first, cache = with_kvtier(model, daemon.target, flash_attn=flash_attn)
    assert answer(first, prompt) == expected
    assert cache.num_hits == 0
    second, cache = with_kvtier(model, daemon.target, flash_attn=flash_attn)
    assert answer(second, prompt) == expected
    assert cache.num_hit_tokens == 299 // BLOCK_TOKENS * BLOCK_TOKENS
    assert cache.num_stored_bytes <= cache.block_bytes, "what is stored does not travel again"
    longer = [*prompt, *expected, *words(2, 90)]
    third, cache = with_kvtier(model, daemon.target, flash_attn=flash_attn)
    assert answer(third, longer) == right(model, longer, flash_attn=flash_attn)
    assert cache.num_hit_tokens >= 300 // BLOCK_TOKENS * BLOCK_TOKENS
    branch = [*prompt[:170], *words(3, 60)]
    assert answer(third, branch) == right(model, branch, flash_attn=flash_attn)
    other = [*words(4, 260), *prompt[260:]]
    num_hits = cache.num_hits
    assert answer(third, other) == right(model, other, flash_attn=flash_attn)
    assert cache.num_hits == num_hits
    assert cache.guard.causes == {}


def test_a_prompt_of_whole_blocks_still_computes_its_last_token(model: Path, daemon: Daemon) -> None:
    prompt = words(5, 4 * BLOCK_TOKENS)
    answer(with_kvtier(model, daemon.target)[0], prompt)
    llm, cache = with_kvtier(model, daemon.target)
    assert answer(llm, prompt) == right(model, prompt)
    assert cache.num_hit_tokens == 3 * BLOCK_TOKENS


def test_contexts_that_write_other_bytes_share_nothing(model: Path, daemon: Daemon, tmp_path: Path) -> None:
    prompt = words(6, 200)
    answer(with_kvtier(model, daemon.target)[0], prompt)
    others: list[tuple[Path, dict[str, Any]]] = [
        (model, {"flash_attn": True}),
        (model, {"rope_freq_base": 10_000.0}),
        (model, {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}),
        (make(tmp_path / "other.gguf", seed=9), {}),
    ]
    for path, settings in others:
        llm, cache = with_kvtier(path, daemon.target, **settings)
        assert answer(llm, prompt) == right(path, prompt, **settings)
        assert cache.num_hits == 0, settings


def test_a_daemon_that_is_gone_is_a_miss(model: Path, daemon: Daemon) -> None:
    prompt = words(7, 200)
    expected = right(model, prompt)
    llm, _ = with_kvtier(model, daemon.target)
    assert answer(llm, prompt) == expected
    daemon.stop(signal.SIGKILL)
    llm, cache = with_kvtier(model, daemon.target)
    assert answer(llm, prompt) == expected
    assert cache.num_hits == 0
    assert prompt not in cache
    daemon.start()
    llm, cache = with_kvtier(model, daemon.target)
    assert answer(llm, prompt) == expected


def test_what_cannot_be_kept_is_refused_when_the_cache_is_made(model: Path, daemon: Daemon) -> None:
    with pytest.raises(UnsupportedState, match="logits_all"):
        KvtierCache(llama(model, logits_all=True), daemon.target)
    used = llama(model)
    used.eval(words(8, 10))
    with pytest.raises(UnsupportedState, match="before its first prompt"):
        KvtierCache(used, daemon.target)
