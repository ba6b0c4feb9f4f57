"""What a tier's namespace covers: every difference that changes the bytes, and no other."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import InvalidRequest
from kvtier.clients.vllm_tier.identity import (
    TierIdentity,
    host_device,
    identity_of,
)
from kvtier.clients.vllm_tier.options import TierOptions

DIGEST = "ab" * 32
OPTIONS = TierOptions(weights_digest=DIGEST)


@dataclass(frozen=True)
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    rank: int = 0
    data_parallel_index: int = 0
    is_parallelism_agnostic: bool = False


@dataclass(frozen=True)
class Model:
    name: str = "org/name"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 4


@dataclass(frozen=True)
class Group:
    group_id: int = 0
    tokens_per_block: int = 32
    layer_names: tuple[str, ...] = ("model.layers.0", "model.layers.1")


@dataclass(frozen=True)
class Config:
    """The fields of vLLM's OffloadingConfig that matter; tests/vllm/tier holds them to the real one."""

    groups: tuple[Group, ...] = (Group(), Group(1, 16, ("model.layers.2",)))
    model: Model = field(default_factory=Model)
    cache: Cache = field(default_factory=Cache)
    parallel: Parallel = field(default_factory=Parallel)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBNHC"
    engine_id: str = "one"


def identity(
    config: Any = Config(), row_bytes: int = 1 << 20, options: TierOptions = OPTIONS, **named: Any
) -> TierIdentity:
    return identity_of(
        config, row_bytes, options, named.pop("vllm_version", "0.32.0"), named.pop("device", "cuda")
    )


BASE = identity().namespace(0)


def test_the_same_again_is_the_same() -> None:
    assert identity().namespace(0) == BASE
    assert BASE.model_digest == bytes.fromhex(DIGEST)
    assert BASE.geometry.block_bytes == 1 << 20
    assert BASE.geometry.block_tokens == 128  # of a chunk


@pytest.mark.parametrize(
    "other",
    [
        identity(replace(Config(), model=Model(dtype="float8_e4m3fn"))),
        identity(replace(Config(), cache=Cache(tokens_per_hash=32))),
        identity(replace(Config(), cache=Cache(blocks_per_chunk=8))),
        identity(replace(Config(), groups=(Group(),))),
        identity(replace(Config(), groups=(Group(layer_names=("a",)), Group(1)))),
        identity(replace(Config(), parallel=Parallel(tp_size=4, world_size=4))),
        identity(replace(Config(), parallel=Parallel(pp_size=2))),
        identity(replace(Config(), parallel=Parallel(dcp_size=2))),
        identity(replace(Config(), kv_cache_layout="LBHNC")),
        identity(replace(Config(), canonical_layout=True)),
        identity(row_bytes=2 << 20),
        identity(options=replace(OPTIONS, weights_digest="cd" * 32)),
        identity(options=replace(OPTIONS, variant="rope x 8")),
        identity(device="xpu"),
        identity(device=host_device("cpu", "AVX512")),
        replace(identity(), epoch="after a reset"),
    ],
)
def test_whatever_changes_the_bytes_is_another_namespace(other: TierIdentity) -> None:
    assert other.namespace(0) != BASE


@pytest.mark.parametrize(
    "read",
    [
        {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}},
        {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su"}},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    ],
    ids=["longrope", "its former name", "Llama 4"],
)
def test_a_model_whose_kv_depends_on_the_longest_request_wants_a_variant(
    tmp_path: Path, read: dict[str, object]
) -> None:
    """vLLM tells a tier no --max-model-len, and LongRoPE's factors for all positions depend on it."""
    (tmp_path / "config.json").write_text(json.dumps(read))
    config = replace(Config(), model=Model(name=str(tmp_path)))
    with pytest.raises(InvalidRequest, match="depends on --max-model-len"):
        identity(config)
    named = [identity(config, options=replace(OPTIONS, variant=text)) for text in ("4k", "64k")]
    assert named[0].namespace(0) != named[1].namespace(0)
    (tmp_path / "config.json").write_text("{}")
    assert identity(config).namespace(0) == BASE


@pytest.mark.parametrize(
    "same",
    [
        identity(replace(Config(), engine_id="two")),
        identity(replace(Config(), parallel=replace(Parallel(), rank=1, data_parallel_index=3))),
        identity(replace(Config(), model=Model(name="/elsewhere/name"))),  # the weights are the same
        identity(vllm_version="0.32.9"),
        identity(options=replace(OPTIONS, target="unix:///else", offload="request", staging_bytes=1)),
    ],
)
def test_whatever_does_not_is_shared(same: TierIdentity) -> None:
    assert same.namespace(0) == BASE


def test_groups_never_meet() -> None:
    assert identity().namespace(1).geometry.block_tokens == 64
    alike = identity(replace(Config(), groups=(Group(0), Group(1))))
    assert alike.namespace(0).geometry == alike.namespace(1).geometry
    assert alike.namespace(0) != alike.namespace(1)


@pytest.mark.parametrize(
    "how", [{"parallel": Parallel(is_parallelism_agnostic=True)}, {"replicated_layout": True}]
)
def test_where_vllm_says_that_parallelism_does_not_matter_it_does_not(how: dict[str, Any]) -> None:
    config = replace(Config(), **how)
    wider = replace(config, parallel=replace(config.parallel, tp_size=8, world_size=8))
    assert identity(config).namespace(0) == identity(wider).namespace(0)


def test_instruction_sets_matter_on_the_cpu_only() -> None:
    assert host_device("cpu", "AVX2") != host_device("cpu", "AVX512")
    assert host_device("cuda", "AVX2") == "cuda"


def test_weights_come_from_digest_folder_or_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    by_name = TierOptions().weights_of(str(tmp_path))
    assert TierOptions(weights=str(tmp_path)).weights_of("org/unknown") == by_name
    assert OPTIONS.weights_of("org/unknown") == bytes.fromhex(DIGEST)
    with pytest.raises(InvalidRequest, match="org/unknown"):
        TierOptions().weights_of("org/unknown")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targt": "x"}, "unknown setting 'targt'.*target"),
        ({"target": 5}, "target of a KvtierTier must be str"),
        ({"load_timeout_s": 0}, "load_timeout_s of a KvtierTier must be above 0"),
        ({"load_timeout_s": True}, "load_timeout_s of a KvtierTier must be float"),
        ({"staging_bytes": 1.5}, "staging_bytes of a KvtierTier must be int"),
        ({"offload": "all"}, "offload must be one of chunk, request"),
        ({"on_reset": ""}, "on_reset must be one of forget, keep"),
        ({"max_waiting_fraction": 2}, "at most 1"),
        ({"weights_digest": "xyz"}, "hexadecimal"),
        ({"weights_digest": "abcd"}, "16 to 64 bytes"),
    ],
)
def test_mistakes_in_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TierOptions.from_settings(settings)


def test_good_settings_pass() -> None:
    options = TierOptions.from_settings({"load_timeout_s": 2, "weights_digest": DIGEST, "offload": "request"})
    assert options.load_timeout_s == 2
    assert TierOptions.from_settings({}) == TierOptions()
