"""The tokens of plain generate, and no others: over architectures, turns, forks, rows and restarts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import Client, Tier
from kvtier.testing import FakeAppliance

from ..daemon import Daemon

WHY = "torch and transformers are not installed; `make test-transformers` runs this"
torch = pytest.importorskip("torch", reason=WHY)
pytest.importorskip("transformers", reason=WHY)

from kvtier.clients.transformers import PrefixStore  # noqa: E402

from .models import SERVED, answer, build, tokens  # noqa: E402

Make = Callable[..., Any]
TINY = "llama, grouped heads"
SLIDING = "gemma-3, some layers sliding"


def same(left: Any, right: Any) -> bool:
    return bool(torch.equal(left, right))


@pytest.mark.parametrize("name", SERVED)
def test_every_turn_is_plain_generates(name: str, make_store: Make) -> None:
    """A prompt told twice, a second turn (from the store, and with the cache that is still there), and a
    prompt that leaves the first one half-way."""
    model = build(name)
    store = make_store(model)
    prompt = tokens(101)
    expected = answer(model, prompt)
    first = store.load(prompt)
    assert first.reuse.num_tokens == 0
    assert same(answer(model, prompt, first), expected)
    saved = first.save()
    assert (saved.num_refused, saved.why_not) == (0, "")

    again = store.load(prompt)
    assert again.reuse.num_tokens == 96
    assert same(answer(model, prompt, again), expected)

    next_prompt = torch.cat([expected, tokens(30, seed=2)], 1)
    next_expected = answer(model, next_prompt)
    from_store = store.load(next_prompt)
    assert from_store.reuse.num_tokens == 112
    assert same(answer(model, next_prompt, from_store), next_expected)
    assert same(answer(model, next_prompt, first), next_expected)
    assert first.save().num_refused == 0
    assert from_store.save().num_stored == 0, "the cache that was still there had stored it"

    elsewhere = torch.cat([prompt[:, :50], tokens(33, seed=3)], 1)
    branch = store.load(elsewhere)
    assert branch.reuse.num_tokens == 48
    assert same(answer(model, elsewhere, branch), answer(model, elsewhere))
    assert store.guard.causes == {}


@pytest.mark.parametrize("name", [TINY, SLIDING, "deepseek-v3, joint latent"])
def test_a_resumed_past_is_the_computed_one(name: str, make_store: Make) -> None:
    """Layer by layer: what a load leaves in the cache is what reading the same tokens leaves."""
    model = build(name)
    store = make_store(model)
    prompt = tokens(73)
    cache = store.load(prompt)
    answer(model, prompt, cache)
    cache.save()
    loaded = store.load(prompt)
    computed = store.load(tokens(2, seed=9))
    with torch.no_grad():
        model(input_ids=prompt[:, : loaded.reuse.num_tokens], past_key_values=computed)
    for one, other in zip(loaded.layers, computed.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length() == 72
        asked = torch.arange(72, 77) if "cache_position" in signature(one.get_mask_sizes).parameters else 5
        assert one.get_mask_sizes(asked) == other.get_mask_sizes(asked)
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_back_bit_for_bit(dtype: str, make_store: Make) -> None:
    model = build(SLIDING).to(getattr(torch, dtype))
    store = make_store(model)
    prompt = tokens(60)
    cache = store.load(prompt)
    answer(model, prompt, cache)
    cache.save(num_tokens=48)
    loaded = store.load(prompt[:, :49])
    assert loaded.reuse.num_tokens == 48
    for number in store.kinds[1].layers:  # full attention: the first cache still has all of it
        assert loaded.layers[number].keys.dtype == getattr(torch, dtype)
        assert same(loaded.layers[number].keys, cache.layers[number].keys[:, :, :48])
        assert same(loaded.layers[number].values, cache.layers[number].values[:, :, :48])


def test_a_fork_goes_its_own_way(make_store: Make) -> None:
    model = build(SLIDING)
    store = make_store(model)
    prompt = tokens(61)
    cache = store.load(prompt, session="trunk")
    begun = answer(model, prompt, cache)
    cache.save()
    ways = [torch.cat([begun, tokens(17, seed=seed)], 1) for seed in (5, 6)]
    caches = [cache, cache.fork("branch")]
    for way, one in zip(ways, caches, strict=True):
        assert same(answer(model, way, one), answer(model, way))
        assert one.save().num_refused == 0
    for way in ways:
        again = store.load(way)
        assert again.reuse.num_tokens == 88
        assert same(answer(model, way, again), answer(model, way))


@pytest.mark.parametrize("name", [TINY, SLIDING])
def test_rows_resume_where_all_of_them_can(name: str, make_store: Make) -> None:
    model = build(name)
    store = make_store(model)
    rows = tokens(70, num_rows=3)
    for row in range(3):
        cache = store.load(rows[row])
        answer(model, rows[row : row + 1], cache)
        cache.save(num_tokens=[70, 40, 64][row])
    batch = store.load(rows)
    assert batch.reuse.num_tokens == 40
    assert same(answer(model, rows, batch), answer(model, rows))
    assert batch.save().num_refused == 0
    assert store.load(rows).reuse.num_tokens == 64


def test_a_system_prompt_is_stored_by_itself(make_store: Make) -> None:
    """Warming up: nothing is generated, the prompt is read and saved."""
    model = build(SLIDING)
    store = make_store(model)
    system = tokens(64)
    cache = store.load(system)
    with torch.no_grad():
        model(input_ids=system, past_key_values=cache, use_cache=True)
    assert cache.save().num_refused == 0
    prompt = torch.cat([system, tokens(20, seed=4)], 1)
    warm = store.load(prompt)
    assert warm.reuse.num_tokens == 64
    assert same(answer(model, prompt, warm), answer(model, prompt))


@pytest.mark.parametrize("name", [TINY, "gpt2, learned positions"])
def test_other_ways_of_generating(name: str, make_store: Make) -> None:
    """Prefill in chunks, prompt lookup (which crops the cache), and sampling from a seed."""
    model = build(name)
    store = make_store(model)
    prompt = torch.cat([tokens(40), tokens(40)], 1)
    lookup = {"prompt_lookup_num_tokens": 3, "eos_token_id": 10_000}  # transformers 4.57 fails without an end
    num_dropped = []
    for more in ({"prefill_chunk_size": 16}, lookup):
        expected = answer(model, prompt, **more)
        for _ in range(2):
            cache = store.load(prompt)
            assert same(answer(model, prompt, cache, **more), expected)
            assert cache.save().why_not == ""
        num_dropped.append(store.counts["dropped: the prompt was read anew"])
    assert num_dropped in ([0, 2], [1, 1], [1, 3]), "lookup in 5.23, chunks in 4.57, both in 5.19"
    again = store.load(prompt)
    assert again.reuse.num_tokens == 72
    torch.manual_seed(3)
    expected = model.generate(prompt, max_new_tokens=12, do_sample=True)
    torch.manual_seed(3)
    assert same(model.generate(prompt, max_new_tokens=12, do_sample=True, past_key_values=again), expected)


def test_what_is_cropped_is_read_anew(make_store: Make) -> None:
    model = build(TINY)
    store = make_store(model)
    prompt = tokens(60)
    cache = store.load(prompt)
    answer(model, prompt, cache)
    cache.save()
    cache.crop(-30)  # 41 left: the user takes a turn back
    other = torch.cat([prompt[:, :41], tokens(20, seed=8)], 1)
    assert same(answer(model, other, cache), answer(model, other))
    assert cache.save().num_refused == 0
    assert store.load(other).reuse.num_tokens == 56
    assert store.load(prompt).reuse.num_tokens == 56, "what was stored before stays right"
    assert same(answer(model, other, store.load(other)), answer(model, other))


CHILD = """
import json, sys
from kvtier.clients import Client
from kvtier.clients.transformers import PrefixStore
from tests.transformers.models import answer, build, tokens
model = build(sys.argv[1])
with Client(sys.argv[2]) as client, PrefixStore(model, client, block_tokens=8) as store:
    prompt = tokens(101)
    cache = store.load(prompt, session="reader")
    output = answer(model, prompt, cache)
    cache.save()
    tiers = {tier.label: count for tier, count in cache.reuse.tokens_by_tier.items()}
    print(json.dumps([cache.reuse.num_tokens, output[0].tolist(), tiers]))
"""


def tell(name: str, target: str) -> Any:
    """Answer one prompt in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, name, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_and_a_restarted_daemon(tmp_path: Path) -> None:
    """The real daemon: written here, read by another process, and again here after the daemon's restart."""
    nvme = (f"tiers.nvme.path={tmp_path}/nvme", "tiers.nvme.capacity=64MiB", "tiers.nvme.segment=16MiB")
    small = ("tiers.dram.capacity=32MiB", "tiers.dram.extent=8MiB", *nvme)
    model, prompt = build(SLIDING), tokens(101)
    with (
        Daemon(tmp_path, settings=small) as daemon,
        Client(daemon.target) as client,
        PrefixStore(model, client, block_tokens=8) as store,
    ):
        cache = store.load(prompt)
        expected = answer(model, prompt, cache)
        assert cache.save().num_refused == 0
        assert tell(SLIDING, daemon.target) == [96, expected[0].tolist(), {"dram": 96}]
        daemon.stop()
        daemon.start()
        again = store.load(prompt, session="reader")
        assert (again.reuse.num_tokens, again.reuse.tokens_by_tier) == (96, {Tier.NVME: 96})
        assert same(answer(model, prompt, again), expected)
        assert again.save().why_not == ""


def test_long_prompts_go_in_pieces(make_store: Make, appliance: FakeAppliance, monkeypatch: Any) -> None:
    """More blocks than fit the buffer, and than fit one call: the first of them are served."""
    from kvtier.clients.transformers import carrier

    model = build(SLIDING)
    monkeypatch.setattr(carrier, "PIECE_BYTES", 3 * 2 * 8 * 2 * 16 * 4)  # three blocks of two layers
    store = make_store(model)
    prompt = tokens(200)
    cache = store.load(prompt)
    expected = answer(model, prompt)
    assert same(answer(model, prompt, cache), expected)
    assert cache.save().num_refused == 0
    again = store.load(prompt)
    assert again.reuse.num_tokens == 192
    assert same(answer(model, prompt, again), expected)
