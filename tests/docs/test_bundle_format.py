"""Bundles are those that docs/bundle-format.md specifies, for kvtier and for a reader written from the page.

The vectors are a promise (bundles outlive the program): they are never regenerated.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvtier.sources.objects.bundle import StoredFragment, read_fragment, write_bundle
from kvtier.sources.objects.fleet_keys import FleetKeys
from kvtier.sources.objects.hidden import HiddenNames
from kvtier.sources.objects.layout import BundleChain, unpack_head
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.base import Encryption
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.codecs.records import RecordCodecs
from kvtier.tiers.cold.record_io import Opener
from kvtier.tiers.encryption.envelope import Envelopes
from kvtier.tiers.encryption.keyring import FILE_NAME, DataKey, Keyring
from kvtier.tiers.encryption.master_keys import MasterKeys
from tests.sources.objects.bundles import verify_bundle

from . import bundle_reader

DOCS = Path(__file__).resolve().parents[2] / "docs"
VECTORS = json.loads((DOCS / "bundle-format.json").read_text())
bundle_vector = pytest.mark.parametrize("vector", VECTORS["bundles"], ids=lambda one: one["about"])


def namespace() -> NamespaceIdentity:
    told = VECTORS["namespace"]
    geometry = Geometry(**told["geometry"])
    found = NamespaceIdentity(bytes.fromhex(told["model_digest"]), geometry, domain=told["domain"])
    assert found.digest.hex() == told["digest"]
    return found


def chain_of(vector: dict[str, Any]) -> BundleChain:
    """Return the chain of a vector as it stands in the head."""
    digest, parent = (bytes.fromhex(vector[name]) for name in ("namespace_digest", "parent_hash"))
    chain = BundleChain(digest, parent, vector["position"], tuple(map(bytes.fromhex, vector["names"])))
    if "hidden" not in vector:
        return chain
    return HiddenNames(DataKey(vector["key_id"], bytes.fromhex(vector["data_key"]))).chain(chain)


def opener_of(vector: dict[str, Any], folder: Path) -> Opener:
    """Return what opens a vector: with a keyring that holds its data key, if it has one."""
    identity, envelopes = namespace(), None
    if "data_key" in vector:
        masters, key_id = MasterKeys(bytes(32)), vector["key_id"]
        bound = b"kvtier data key" + key_id.to_bytes(4, "big") + b"tenant:red"
        wrapped = masters.wrap(bytes.fromhex(vector["data_key"]), bound).hex()
        keys = {"tenant:red": {"id": key_id, "master": masters.current_id, "wrapped": wrapped}}
        content = {"format": "kvtier keys", "version": 1, "keys": keys, "erased": {}}
        (folder / FILE_NAME).write_text(json.dumps(content))
        envelopes = Envelopes(Keyring(folder, masters))
    namespaces = {chain_of(vector).namespace_digest: identity}
    return Opener(namespaces, RecordCodecs(namespaces), envelopes)


@bundle_vector
def test_bundles_are_read_as_specified(vector: dict[str, Any], tmp_path: Path) -> None:
    data = bytes.fromhex(vector["bundle"])
    head = verify_bundle(memoryview(data))
    head.require(chain_of(vector), namespace().geometry)
    opener = opener_of(vector, tmp_path)
    for index, payload in enumerate(vector["payloads"]):
        group, block = divmod(index, head.num_blocks)
        start, end = head.span(group, block)
        into = memoryview(bytearray(len(payload) // 2))
        read_fragment(head, group, block, memoryview(bytearray(data[start:end])), into, opener)
        assert into.hex() == payload


@bundle_vector
def test_the_page_is_enough_to_read_bundles(vector: dict[str, Any]) -> None:
    found = bundle_reader.read(bytes.fromhex(vector["bundle"]), bytes.fromhex(vector.get("data_key", "")))
    shown = vector.get("hidden", vector)
    assert found.is_hidden == ("hidden" in vector)
    assert found.namespace.hex() == shown["namespace_digest"]
    assert (found.parent or b"").hex() == shown["parent_hash"]
    assert [name.hex() for name in found.names] == shown["names"]
    groups = range(len(vector["payloads"]) // len(found.names))
    assert [(one.group, one.name) for one in found.payloads] == list(itertools.product(groups, found.names))
    for one, payload in zip(found.payloads, vector["payloads"], strict=True):
        raw = bytes.fromhex(payload)
        assert (one.raw_length, one.raw_checksum) == (len(raw), xxhash.xxh3_128_digest(raw))
        assert one.codec or one.stored == raw
    assert [one.codec for one in found.payloads] == vector.get("codecs", [0] * len(found.payloads))


@bundle_vector
def test_bundles_are_written_byte_by_byte_as_specified(vector: dict[str, Any]) -> None:
    """From payloads as they stand: what codecs and encryption make of them may differ, what is around not."""
    data = bytes.fromhex(vector["bundle"])
    head = unpack_head(data)
    fragments = []
    for index, payload in enumerate(map(bytes.fromhex, vector["payloads"])):
        group, block = divmod(index, head.num_blocks)
        start, end = head.span(group, block)
        label = head.label(group, block)
        seal = Encryption(head.key, head.envelope(index)) if head.key else None
        checksum = b"" if seal else xxhash.xxh3_128_digest(payload)
        stored = memoryview(data)[start:end]
        fragments.append(StoredFragment(stored, len(payload), checksum, label.codec_id, label.is_spent, seal))
    assert write_bundle(chain_of(vector), head.num_groups, fragments).tobytes() == data


def test_names_are_hidden_as_specified() -> None:
    [vector] = [one for one in VECTORS["bundles"] if "hidden" in one]
    data_key, digest = bytes.fromhex(vector["data_key"]), bytes.fromhex(vector["namespace_digest"])
    hidden, parent = vector["hidden"], bytes.fromhex(vector["parent_hash"])
    assert bundle_reader.hide(data_key, "namespace", digest).hex() == hidden["namespace_digest"]
    assert bundle_reader.hide(data_key, "parent", digest, parent).hex() == hidden["parent_hash"]
    names = [bundle_reader.hide(data_key, "block", digest, bytes.fromhex(name)) for name in vector["names"]]
    assert [name.hex() for name in names] == hidden["names"]
    chain = chain_of(vector)
    assert (chain.namespace_digest.hex(), chain.parent_hash.hex()) == (
        hidden["namespace_digest"],
        hidden["parent_hash"],
    )
    assert [name.hex() for name in chain.names] == hidden["names"]


def test_wrapped_keys_are_read_as_specified(tmp_path: Path) -> None:
    [vector] = VECTORS["tenant_keys"]
    data_key, master_key = bytes.fromhex(vector["data_key"]), bytes.fromhex(vector["master_key"])
    assert bundle_reader.unwrap(master_key, vector["key"], vector["object"].encode()) == data_key
    pytest.importorskip("obstore")
    store = ObjectStore(f"file://{tmp_path}")
    store.create(vector["key"], memoryview(vector["object"].encode()))
    keys = FleetKeys(MasterKeys(master_key))
    keys.open(store)
    assert keys.key_for_writing(vector["tenant"]).secret == data_key


def test_the_worked_example_of_the_page_is_the_first_vector() -> None:
    page = (DOCS / "bundle-format.md").read_text()
    [example] = re.findall(r"```text\n(6b76.+?)\n```", page, re.S)
    shown = "".join(re.sub(r"\(.*?\)", "00" * 64, example, flags=re.S).split())
    assert VECTORS["bundles"][0]["bundle"].startswith(shown)
