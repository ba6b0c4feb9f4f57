"""What a page's namespace covers, and how its key becomes a hash."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import InvalidRequest, NamespaceIdentity
from kvtier.clients.sglang.identity import (
    StorageOptions,
    hash_of,
    namespace_of,
)

WEIGHTS = b"w" * 32


@dataclass(frozen=True)
class Config:
    """The fields of HiCacheStorageConfig; tests/sglang/contract holds them to the real one."""

    tp_rank: int = 1
    tp_size: int = 4
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "served"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass(frozen=True)
class Pool:
    layout: str = "page_first"
    dtype: str = "torch.bfloat16"
    page_size: int = 64
    start_layer: int = 0
    end_layer: int = 31
    storage_format_tag: str | None = None


@dataclass(frozen=True)
class OtherPool(Pool):
    extra: dict[str, Any] = field(default_factory=dict)


def identity(
    config: Any = Config(),
    pool: Any = Pool(),
    name: str = "kv",
    page_bytes: int = 1 << 20,
    weights: bytes = WEIGHTS,
    variant: str = "",
) -> NamespaceIdentity:
    return namespace_of(config, name, pool, page_bytes, weights, variant)


BASE = identity()


@pytest.mark.parametrize(
    "other",
    [
        identity(replace(Config(), tp_rank=2)),
        identity(replace(Config(), tp_size=8)),
        identity(replace(Config(), pp_rank=1, pp_size=2)),
        identity(replace(Config(), attn_cp_rank=1, attn_cp_size=2)),
        identity(replace(Config(), is_mla_model=True)),
        identity(replace(Config(), should_split_heads=True, tp_lcm_size=8)),
        identity(replace(Config(), dcp_rank=1, dcp_size=2, logical_page_size=128)),
        identity(pool=replace(Pool(), layout="layer_first")),
        identity(pool=replace(Pool(), dtype="torch.float8_e5m2")),
        identity(pool=replace(Pool(), page_size=32)),
        identity(pool=replace(Pool(), start_layer=4)),
        identity(pool=replace(Pool(), end_layer=15)),
        identity(pool=replace(Pool(), storage_format_tag="envelope")),
        identity(pool=OtherPool()),
        identity(name="swa"),
        identity(page_bytes=2 << 20),
        identity(weights=b"v" * 32),
        identity(variant="rope x 8"),
    ],
)
def test_whatever_changes_the_bytes_is_another_namespace(other: NamespaceIdentity) -> None:
    assert other != BASE


def test_names_and_replicas_do_not_matter() -> None:
    assert identity(replace(Config(), model_name="another name", dp_rank=3)) == BASE
    assert BASE.geometry.block_tokens == 64
    assert BASE.geometry.block_bytes == 1 << 20


def test_ranks_share_what_is_replicated_and_only_that() -> None:
    mla = [replace(Config(), is_mla_model=True, tp_rank=rank) for rank in range(4)]
    assert len({identity(one) for one in mla}) == 1
    assert len({identity(one, name="mamba") for one in mla}) == 4


def test_keys() -> None:
    digest = hashlib.sha256(b"page").hexdigest()
    assert hash_of(digest) == bytes.fromhex(digest)
    others = ["", "abcd", digest[:-2], digest + "00", digest + ".mamba", "no hexadecimal"]
    hashes = {hash_of(key) for key in [digest, *others]}
    assert len(hashes) == len(others) + 1
    assert {len(one) for one in hashes} == {32}


def test_weights(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    by_folder = StorageOptions(weights=str(tmp_path)).weights_of("org/unknown")
    assert StorageOptions().weights_of(str(tmp_path)) == by_folder
    assert StorageOptions(weights_digest="ab" * 32).weights_of("org/unknown") == bytes.fromhex("ab" * 32)
    with pytest.raises(InvalidRequest, match="give their folder, or a digest"):
        StorageOptions().weights_of("org/unknown")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kvtier": {"taget": "x"}}, "unknown setting 'taget' of the kvtier backend"),
        ({"kvtier": {"load_timeout_s": -1}}, "above 0"),
        ({"kvtier": {"weights_digest": "zz"}}, "hexadecimal"),
        ({"kvtier": "unix:///x"}, "must be an object of settings"),
    ],
)
def test_mistakes_in_settings_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StorageOptions.from_config(extra)


def test_settings_of_sglang_itself_are_left_alone() -> None:
    assert StorageOptions.from_config(None) == StorageOptions()
    extra = {"backend_name": "kvtier", "prefetch_threshold": 256, "kvtier": {"domain": "a"}}
    assert StorageOptions.from_config(extra).domain == "a"
