"""Names of blocks are the engine's own, the same in every process."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request

from kvtier.clients.vllm import engine
from kvtier.clients.vllm.names import block_names

from .connector_scene import BLOCK, request


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_names_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # 0.28 has no stable names without
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    tokens = [0, 23, 24, 255, 256, 65_536, 151_000, *range(3 * BLOCK)]
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    own = Request("r", tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher).block_hashes
    assert block_names(tokens, BLOCK, algorithm=algorithm, seed="7") == list(own)
    if engine.NAMES_ARE_STABLE:
        monkeypatch.delenv("PYTHONHASHSEED")
        init_none_hash(hash_fn)
        own = Request("r", tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher).block_hashes
        assert block_names(tokens, BLOCK, algorithm=algorithm) == list(own)


def test_block_hashes_are_32_bytes_and_the_same_everywhere() -> None:
    """Two engines share blocks by them. The value is that of vLLM 0.32 with sha256."""
    first = request(2 * BLOCK + 5)
    assert [len(name) for name in first.block_hashes] == [32, 32]
    assert first.block_hashes == request(2 * BLOCK).block_hashes
    assert first.block_hashes != request(2 * BLOCK, salt="tenant").block_hashes
