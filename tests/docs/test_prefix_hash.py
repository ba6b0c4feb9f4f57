"""The names of blocks are those that docs/prefix-hash.md specifies, in every implementation there is.

The vectors are a promise (other languages were written against them): they are never regenerated.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Geometry, InvalidRequest, NamespaceIdentity, prefix_hashes
from kvtier.tiers.block import Geometry as DaemonGeometry
from kvtier.tiers.block import NamespaceIdentity as DaemonIdentity

from . import prefix_names

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "docs" / "prefix-hash.json").read_text())
DIGESTS = ("model_digest", "adapter_digest", "profile_digest")
prefix_vector = pytest.mark.parametrize("vector", VECTORS["prefix_hashes"], ids=lambda one: one["about"])
identity_vector = pytest.mark.parametrize(
    "vector", VECTORS["namespace_digests"], ids=lambda one: one["about"]
)


def geometry(block_tokens: int) -> Geometry:
    return Geometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=block_tokens, dtype="int8")


def unpacked(vector: dict[str, Any]) -> tuple[int, list[int], bytes, list[bytes]]:
    tokens = [int(token) for token in vector["tokens"]]
    keys = [bytes.fromhex(key) for key in vector["extra_keys"]]
    return vector["block_tokens"], tokens, bytes.fromhex(vector["parent"]), keys


@prefix_vector
def test_the_client_names_blocks_as_specified(vector: dict[str, Any]) -> None:
    block_tokens, tokens, parent, keys = unpacked(vector)
    found = prefix_hashes(geometry(block_tokens), tokens, parent=parent, extra_keys=keys)
    assert [name.hex() for name in found] == vector["hashes"]
    as_array = np.array(tokens, np.uint64)
    assert prefix_hashes(geometry(block_tokens), as_array, parent=parent, extra_keys=keys) == found


@prefix_vector
def test_the_page_is_enough_to_name_blocks(vector: dict[str, Any]) -> None:
    assert [name.hex() for name in prefix_names.names(*unpacked(vector))] == vector["hashes"]
    first = next(prefix_names.inputs(*unpacked(vector)), b"")
    assert first.hex() == vector["first_input"]


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("prefix") / "prefix_hash"
    source = ROOT / "examples" / "prefix_hash.c"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", str(program), str(source)], check=True)
    return program


@prefix_vector
def test_the_program_in_c_names_blocks_as_specified(in_c: Path, vector: dict[str, Any]) -> None:
    command = [str(in_c), str(vector["block_tokens"]), vector["parent"] or "-"]
    command += [",".join(vector["tokens"]) or "-", *(key or "-" for key in vector["extra_keys"])]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.split() == vector["hashes"]


@identity_vector
def test_namespaces_have_the_digest_that_is_specified(vector: dict[str, Any]) -> None:
    identity = {**vector["identity"]}
    hashed = prefix_names.namespace_input(identity)
    assert hashed.hex() == vector["input"]
    shape = {name: identity[name] for name in ("dtype", "layout", *prefix_names.NUMBERS)}
    named: dict[str, Any] = {name: bytes.fromhex(identity[name]) for name in DIGESTS}
    named |= {name: identity[name] for name in ("shard", "domain")}
    ours = NamespaceIdentity(geometry=Geometry(**shape), **named)
    theirs = DaemonIdentity(geometry=DaemonGeometry(**shape), **named)
    assert [ours.digest.hex(), theirs.digest.hex()] == [vector["digest"]] * 2


def test_the_worked_example_of_the_page_is_the_first_vector() -> None:
    page = (ROOT / "docs" / "prefix-hash.md").read_text()
    (example,) = re.findall(r"```text\n(block 0.*?)```", page, re.S)
    lines = [line.split(maxsplit=1)[1] if line.startswith("block") else line for line in example.splitlines()]
    (first, name, second, last) = [re.sub(r"^\s*(\d+|name)\s+", "", line) for line in lines]
    vector = VECTORS["prefix_hashes"][0]
    block_tokens, tokens, parent, keys = unpacked(vector)
    wanted = [one.hex() for one in prefix_names.inputs(block_tokens, tokens, parent, keys)]
    assert first.replace(" ", "") == wanted[0]
    assert second.replace("(the name of block 0)", name).replace(" ", "") == wanted[1]
    assert [name, last] == vector["hashes"]


def test_the_vectors_differ_from_each_other() -> None:
    names = [vector["hashes"][0] for vector in VECTORS["prefix_hashes"] if vector["hashes"]]
    names += [vector["digest"] for vector in VECTORS["namespace_digests"]]
    num_equal = len(names) - len(set(names))
    assert num_equal == 0


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5, 2.0],
        np.array([1.5, 2.0]),
        [-1, 2],
        np.array([-1, 2]),
        [[1, 2]],
        ["1", "2"],
        [2**64, 1],
        [None, 1],
    ],
    ids=repr,
)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    """Rounded, wrapped or flattened they would be the names of another prompt."""
    with pytest.raises(InvalidRequest, match="one row of integers"):
        prefix_hashes(geometry(2), tokens)


def test_keys_that_are_no_list_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="pass \\['salt'\\]"):
        prefix_hashes(geometry(2), [1, 2], extra_keys="salt")
