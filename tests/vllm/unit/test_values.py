"""Options, versions, groups, sessions, identities, pages, acknowledgements: values in, values out."""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Retention
from kvtier.clients.errors import InvalidRequest, PreconditionFailed
from kvtier.clients.vllm import identity
from kvtier.clients.vllm.counters import NAMES, Counters
from kvtier.clients.vllm.groups import Group, alignment_of, groups_of, why_not
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import Ack, Acks, Again
from kvtier.clients.vllm.scheduler.sessions import Turn, turn_of
from kvtier.clients.vllm.versions import is_tested, why_not_served
from kvtier.clients.vllm.worker.pages import LayerView, PagedGroup

MODEL = bytes(range(32))

# ------------------------------------------------------------------------------------------ options


def test_options_come_from_the_engines_config() -> None:
    options = Options.from_config({"target": "unix:///x", "answer_timeout_s": 2, "save": "prompt"})
    assert (options.target, options.answer_timeout_s, options.save) == ("unix:///x", 2.0, "prompt")
    assert Options.from_config({"max_arriving_loads": 0, "answer_wait_s": 0}, {}).max_arriving_loads == 0
    assert Options.from_config({}, {"KVTIER_TARGET": "unix:///there"}).target == "unix:///there"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"targt": "x"}, "unknown setting 'targt' of kv_connector_extra_config; it knows target"),
        ({"save": "some"}, "must be one of all, prompt, none"),
        ({"load": "yes"}, "load of kv_connector_extra_config must be bool"),
        ({"num_load_threads": True}, "num_load_threads of kv_connector_extra_config must be int"),
        ({"num_load_threads": 0}, "above 0"),
        ({"num_load_threads": 65}, "at most 64"),
        ({"min_load_tokens": -1}, "at least 0"),
        ({"answer_timeout_s": 0.0}, "above 0"),
        ({"load_timeout_s": 601.0}, "at most 600"),
        ({"max_unsaved_fraction": 0.0}, "above 0"),
        ({"lease_ttl_s": 0.5}, "at least 1"),
        ({"lease_ttl_s": 3600.0}, "at most 600"),
        ({"max_unsaved_fraction": 1.0}, "at most 0.9"),
        ({"model_digest": "zz"}, "hexadecimal"),
        ({"model_digest": "00"}, "16 to 64 bytes"),
    ],
)
def test_wrong_options_are_refused_with_the_fix(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        Options.from_config(extra, {})


class Base:
    """What an engine's base class passes to hooks."""

    def start_load(self, context: Any, **kwargs: Any) -> None: ...

    def shutdown(self) -> None: ...


class Fitting(Base):
    def start_load(self, context: Any, **kwargs: Any) -> None: ...


class NewerBase:
    def start_load(self, context: Any, stream: Any, **kwargs: Any) -> None: ...

    def wake_up(self) -> None: ...


@pytest.mark.parametrize("version", ["0.28.0", "0.31.2", "0.32.7+cpu", "0.33.1.dev3+g123"])
def test_tested_versions_are_served(version: str) -> None:
    assert is_tested(version)
    assert why_not_served(version, NewerBase, Fitting) == ""


@pytest.mark.parametrize("version", ["0.34.0", "0.320.0", "1.0"])
def test_a_newer_version_is_served_if_its_interface_fits(version: str) -> None:
    assert not is_tested(version)
    assert why_not_served(version, Base, Fitting) == ""
    words = f"vLLM {version} calls start_load(self, context, stream, kwargs)"
    assert why_not_served(version, NewerBase, Fitting) == words


@pytest.mark.parametrize("version", ["0.27.2", "0.3.3", "dev"])
def test_an_older_version_is_not_served(version: str) -> None:
    assert why_not_served(version, Base, Fitting) == (
        f"vLLM {version} is older than 0.28, the oldest that this kvtier knows"
    )


# ------------------------------------------------------------------------------------------- groups


class FullAttentionSpec:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class SlidingWindowSpec:
    block_size = 32
    sliding_window = 100
    extra_retained_tokens = 2


class MambaSpec:
    block_size = 32


class MLAAttentionSpec:
    block_size = 32


def config(
    *specs: Any, algorithm: str = "sha256", is_chunked: bool = True, **parallel: int
) -> tuple[Any, Any]:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    settings = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=is_chunked),
    )
    return settings, SimpleNamespace(kv_cache_groups=groups)


def test_groups_of_a_hybrid_model() -> None:
    engine, caches = config(FullAttentionSpec(64), SlidingWindowSpec())
    assert why_not(engine, caches, 32) == ""
    groups = groups_of(caches, 32)
    assert groups == [Group(0, 64, 2), Group(1, 32, 1, 102)]
    assert alignment_of(groups) == 64
    names = [bytes([i]) * 32 for i in range(5)]
    assert groups[0].chain(names) == [names[1], names[3]]
    assert groups[1].chain(names) == names
    assert groups[1].first_needed(192) == (192 - 102) // 32
    assert groups[0].first_needed(192) == 0


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (config(MambaSpec()), "MambaSpec"),
        (config(MLAAttentionSpec(), is_chunked=False), "passes over a prefix"),
        (config(FullAttentionSpec(48)), "between two hashes"),
        (config(), "no KV cache"),
        (config(FullAttentionSpec(32), algorithm="xxhash"), "--prefix-caching-hash-algo sha256"),
        (config(FullAttentionSpec(32), decode_context_parallel_size=2), "decode_context_parallel_size"),
    ],
)
def test_what_cannot_be_served_is_named(made: tuple[Any, Any], why: str) -> None:
    assert why in why_not(*made, 32)


def test_a_group_that_must_stay_is_not_served() -> None:
    engine, caches = config(FullAttentionSpec(32))
    caches.kv_cache_groups[0].enable_kv_transfer = False
    assert "not for external transfer" in why_not(engine, caches, 32)


# ------------------------------------------------------------------------------------------ sessions


def asked(params: Any = None, session_id: str | None = None, kv_hints: Any = None) -> Any:
    return SimpleNamespace(
        request_id="7",
        kv_transfer_params=params,
        session_id=session_id,
        num_prompt_tokens=100,
        kv_hints=kv_hints,
    )


def test_a_request_without_a_name_is_its_own_session() -> None:
    turn = turn_of(asked(), "engine")
    assert (turn.session, turn.is_last, turn.deadline_s) == ("engine/7", True, None)
    assert turn_of(asked(), "other").session != turn.session


def test_named_sessions_stay_until_their_last_turn() -> None:
    params = {"kvtier_session": "chat", "kvtier_deadline_s": 2, "kvtier_returns_in_s": 0.5}
    turn = turn_of(asked(params), "engine")
    assert turn == Turn("chat", 2.0, 0.5, False, True, True)
    assert turn_of(asked({**params, "kvtier_last": True}), "engine").is_last
    assert turn_of(asked(session_id="from the API"), "engine")[:4] == ("from the API", None, None, False)


@pytest.mark.parametrize("params", ["text", {"kvtier_session": 5}, {"kvtier_session": "x" * 300}])
def test_hints_that_make_no_sense_are_ignored(params: Any) -> None:
    assert turn_of(asked(params), "engine").session == "engine/7"
    for value in (-1, "soon", True, float("nan")):
        assert turn_of(asked({"kvtier_deadline_s": value}), "engine").deadline_s is None


def test_hints_come_in_the_engines_own_field_or_as_a_parameter() -> None:
    retain = {
        "action_id": "1",
        "action_type": "kv.retain",
        "action_version": "1.0",
        "payload": {"directives": [{"covers_output": True, "priority": 0}]},
    }
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [retain]}
    for request in (asked(kv_hints=envelope), asked({"kvtier_hints": envelope})):
        assert turn_of(request, "engine").retention == (Retention(0, 100),)
    evict = {**envelope, "actions": [{**retain, "action_type": "kv.evict", "payload": {}}]}
    assert turn_of(asked({"kvtier_session": "chat"}, kv_hints=evict), "engine").is_last
    both = turn_of(asked({"kvtier_hints": envelope}, kv_hints=evict), "engine")
    assert both.retention == (), "the engine's own field counts"


# ---------------------------------------------------------------------------------------- identities


def described(**changes: Any) -> Any:
    plain = {
        "model": MODEL,
        "num_layers": 12,
        "layer_bytes": 2 * 32 * 2 * 64 * 2,
        "block_tokens": 32,
        "heads": (2, 64, "bfloat16"),
        "layout": "L",
        "shard": "tp=0/1",
        "domain": "",
    }
    return identity.identity_of(**{**plain, **changes})


def test_geometry_says_what_is_known() -> None:
    geometry = described().geometry
    assert (geometry.num_kv_heads, geometry.head_dim, geometry.dtype, geometry.num_planes) == (
        2,
        64,
        "bfloat16",
        2,
    )
    assert geometry.block_bytes == 12 * 16384


def test_a_padded_page_is_opaque_bytes() -> None:
    geometry = described(layer_bytes=16384 + 96).geometry
    assert (geometry.dtype, geometry.num_layers, geometry.layer_bytes) == ("int8", 12, 16384 + 96)


def test_fragments_are_about_a_megabyte() -> None:
    assert described(num_layers=12, layer_bytes=1 << 18, heads=(1, 1, "int8")).geometry.layers_per_group == 4
    assert described(num_layers=7, layer_bytes=1 << 19, heads=(1, 1, "int8")).geometry.layers_per_group == 1
    assert described(num_layers=12, layers_per_group=6).geometry.layers_per_group == 6
    with pytest.raises(InvalidRequest, match="use a divisor"):
        described(num_layers=12, layers_per_group=5)


@pytest.mark.parametrize(
    "change",
    [
        {"model": bytes(32)},
        {"heads": (2, 64, "float16")},
        {"layout": "L, isa=amx"},
        {"shard": "tp=1/2"},
        {"domain": "tenant"},
        {"block_tokens": 16, "layer_bytes": 8192},
    ],
)
def test_whatever_differs_is_another_namespace(change: dict[str, Any]) -> None:
    assert described(**change) != described()


def test_salt_and_adapter_part_namespaces() -> None:
    plain = described()
    assert identity.salted(plain, "", b"") == plain
    salted = identity.salted(plain, "after the weights changed", b"")
    adapted = identity.salted(plain, "", bytes(32))
    assert len({one.digest for one in (plain, salted, adapted)}) == 3


def test_model_digest_covers_weights_and_configuration(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    first = identity.model_digest(str(tmp_path), None, {"rope": 1})
    assert first == identity.model_digest(str(tmp_path), None, {"rope": 1})
    assert first != identity.model_digest(str(tmp_path), None, {"rope": 2})
    elsewhere = {"rope": 1, "transformers_version": "5.19.0", "_name_or_path": "/another/place"}
    assert first == identity.model_digest(str(tmp_path), None, elsewhere)
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"abcX")
    assert first != identity.model_digest(str(tmp_path), None, {"rope": 1})
    assert identity.model_digest("nowhere", None, {}, given="ab" * 16)
    with pytest.raises(InvalidRequest):
        identity.model_digest("no/such-model", None, {})


def test_adapter_digest_follows_the_files(tmp_path: Path) -> None:
    assert identity.adapter_digest("") == b""
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    first = identity.adapter_digest(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert len(first) == 32
    second = identity.adapter_digest(str(tmp_path))
    assert second != first
    before = (tmp_path / "adapter_config.json").stat().st_mtime_ns
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    os.utime(tmp_path / "adapter_config.json", ns=(before, before))  # a clock that did not go on
    assert identity.adapter_digest(str(tmp_path)) == first


def test_an_adapter_is_another_one_by_any_byte_though_times_and_sizes_are_kept(tmp_path: Path) -> None:
    """As `rsync -t` or an unpacked archive leaves it; in the middle of a large file, too."""
    weights = tmp_path / "adapter_model.bin"
    content = bytearray(8 << 20)
    weights.write_bytes(content)
    before = weights.stat().st_mtime_ns
    first = identity.adapter_digest(str(tmp_path))
    content[5_000_001] = 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before, before))
    assert identity.adapter_digest(str(tmp_path)) != first
    content[5_000_001] = 0
    other = tmp_path / "other"
    other.write_bytes(content)
    os.utime(other, ns=(before, before))
    other.rename(weights)
    assert identity.adapter_digest(str(tmp_path)) == first


# --------------------------------------------------------------------------------------------- pages


def view(array: Any) -> LayerView:
    return LayerView(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_pieces_are_the_bytes_of_the_block(order: tuple[int, ...]) -> None:
    """Whatever the physical order, the same bytes come out and go back to the same elements."""
    blocks, heads, tokens, content = 6, 2, 4, 8
    layers = []
    for seed in range(3):
        shape = tuple((blocks, heads, tokens, content)[axis] for axis in order)
        data = np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)
        layers.append(data.transpose(np.argsort(order)))
    paged = PagedGroup([view(layer) for layer in layers], blocks)
    pieces = paged.pieces([4, 1])
    assert (
        pieces.addresses.shape[1] * pieces.piece_bytes
        == paged.block_bytes
        == 3 * heads * tokens * content * 2
    )
    read = [
        b"".join(_peek(address, pieces.piece_bytes) for address in row) for row in pieces.addresses.tolist()
    ]
    for got, block in zip(read, (4, 1), strict=True):
        inner = sorted(range(1, 4), key=lambda axis: -layers[0].strides[axis])
        expected = b"".join(
            layer[block].transpose([axis - 1 for axis in inner]).tobytes() for layer in layers
        )
        assert got == expected


def test_contiguous_blocks_are_one_piece_a_layer() -> None:
    paged = PagedGroup([view(np.zeros((6, 2, 4, 8), np.uint16)) for _ in range(3)], 6)
    assert paged.pieces([0]).addresses.shape == (1, 3)


def test_what_is_no_paged_cache_is_refused() -> None:
    good = np.zeros((6, 2, 4, 8), np.uint16)
    with pytest.raises(PreconditionFailed, match="differ in shape"):
        PagedGroup([view(good), view(np.zeros((6, 2, 4, 4), np.uint16))], 6)
    with pytest.raises(PreconditionFailed, match="manages 7"):
        PagedGroup([view(good)], 7)
    with pytest.raises(PreconditionFailed, match="without layers"):
        PagedGroup([], 6)
    with pytest.raises(ValueError, match="block ids"):
        PagedGroup([view(good)], 6).pieces([6])


def _peek(address: int, num_bytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, num_bytes)


# ---------------------------------------------------------------------------------------- bookkeeping


def test_acks_of_ranks_add_up_to_what_all_have() -> None:
    first = Acks({1: Ack(1, 5), 2: Ack(1, 3, Again.REST)})
    first.add(Acks({1: Ack(1, 2, Again.ALL), 3: Ack(1, 1)}))
    assert first.by_job == {1: Ack(2, 2, Again.ALL), 2: Ack(1, 3, Again.REST), 3: Ack(1, 1)}


def test_counters_are_taken_once() -> None:
    counters = Counters()
    counters.add("hits")
    counters.add("hits", 2)
    assert counters.take() == {"hits": 3}
    assert counters.take() == {}
    with pytest.raises(AssertionError):
        counters.add("no such name")
    assert all(meaning.endswith(".") for meaning in NAMES.values())


def test_the_package_is_loaded_by_nobody_else() -> None:
    import subprocess
    import sys

    code = "import sys, kvtier.clients; print([m for m in sys.modules if 'vllm' in m])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    assert replace(Options(), save="none").save == "none"
