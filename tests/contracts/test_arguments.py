"""Wrong arguments of every public call: InvalidRequest that names the argument and the fix, in every world.

One family of exceptions is documented (errors.py), and nothing else is raised: no TypeError, no
AttributeError. The next call is none the worse for it.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvtier.clients
from kvtier.clients import (
    Client,
    Geometry,
    InvalidRequest,
    Namespace,
    NamespaceIdentity,
    Retention,
    Urgency,
    prefix_hashes,
)
from kvtier.testing import FakeAppliance

from ..daemon import TWO_MEMORIES, Daemon
from .client_worlds import WORLDS, World

GEOMETRY = Geometry(2, 2, 64, 16, "bfloat16", layers_per_group=1)
BLOCK = GEOMETRY.block_bytes
DIGEST = hashlib.sha256(b"arguments").digest()
NAMES = prefix_hashes(GEOMETRY, range(32))
DATA = np.zeros(2 * BLOCK, np.uint8)
KV: Any = kvtier.clients  # without its types: they are what is wrong here
TEXT = hashlib.sha256(b"text").hexdigest()[:32]  # as long as a hash


@pytest.fixture(scope="module")
def two_memories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of this file: they store next to nothing."""
    with Daemon(tmp_path_factory.mktemp("memories"), settings=TWO_MEMORIES) as running:
        yield running


@pytest.fixture(scope="module", params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with WORLDS[request.param](request) as made:
        yield made


@pytest.fixture(scope="module")
def client(world: World) -> Any:
    return world.client(name="arguments")


@pytest.fixture(scope="module")
def namespace(client: Any) -> Namespace:
    found = client.register(NamespaceIdentity(DIGEST, GEOMETRY))
    assert isinstance(found, Namespace)
    assert client.put(found, NAMES, DATA).complete
    assert client.get(found, NAMES[:1], np.empty(BLOCK, np.uint8)).num_blocks == 1  # one-sided from here on
    return found


#: Values of no chain: each is `hashes` of every call that takes one.
NO_CHAIN: dict[str, Any] = {
    "text": TEXT,
    "a list of texts": [TEXT],
    "a list of numbers": [1, 2],
    "nothing": None,
    "a number": 7,
    "a generator": (name for name in NAMES),
    "a set": set(NAMES),
    "half a number": 3.5,
    "wide elements": [np.zeros(32, np.uint32)],
}
TAKES_CHAIN: dict[str, Callable[[Any, Namespace, Any], Any]] = {
    "lookup": lambda c, n, hashes: c.lookup(n, hashes),
    "rank": lambda c, n, hashes: c.rank(n, hashes),
    "put": lambda c, n, hashes: c.put(n, hashes, DATA),
    "get": lambda c, n, hashes: c.get(n, hashes),
    "get into": lambda c, n, hashes: c.get(n, hashes, np.empty(BLOCK, np.uint8)),
    "acquire": lambda c, n, hashes: c.acquire(n, hashes),
    "pin": lambda c, n, hashes: c.pin(n, hashes, 1.0),
    "prefetch": lambda c, n, hashes: c.prefetch(n, hashes),
}


@pytest.mark.parametrize("what", NO_CHAIN)
@pytest.mark.parametrize("call", TAKES_CHAIN)
def test_no_chain(client: Any, namespace: Namespace, call: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=r"hashes.*prefix_hashes\(\)") as raised:
        TAKES_CHAIN[call](client, namespace, NO_CHAIN[what])
    assert raised.value.reason == "BAD_KEY"


ONE = np.empty(BLOCK, np.uint8)
STRIDED = np.zeros((2, 2 * BLOCK), np.uint8)[:, ::2]
#: What is called with client and namespace, and what the message must say.
WRONG: dict[str, tuple[Callable[[Any, Namespace], Any], str]] = {
    "register: no identity": (lambda c, n: c.register(DIGEST), "identity must be a NamespaceIdentity"),
    "register: no speed": (lambda c, n: c.register(n.identity, 5000.0), "prefill must be a PrefillSpeed"),
    "lookup: no namespace": (lambda c, n: c.lookup("model", NAMES), "namespace must be a Namespace"),
    "rank: no namespace": (lambda c, n: c.rank("model", NAMES), "namespace must be a Namespace"),
    "rank: a list of hosts": (lambda c, n: c.rank(n, NAMES, ["a"]), "queues must be a dict"),
    "rank: a queue of text": (lambda c, n: c.rank(n, NAMES, {"a": "1"}), "each of queues must be a number"),
    "rank: a negative queue": (lambda c, n: c.rank(n, NAMES, {"a": -1.0}), "each of queues must be a number"),
    "rank: host of bytes": (lambda c, n: c.rank(n, NAMES, {b"a": 0.0}), "each host of queues must be a str"),
    "put: no namespace": (lambda c, n: c.put(n.identity, NAMES, DATA), "namespace must be a Namespace"),
    "get: no namespace": (lambda c, n: c.get(None, NAMES), "namespace must be a Namespace"),
    "get one: no namespace": (lambda c, n: c.get(None, NAMES[:1], ONE), "namespace must be a Namespace"),
    "acquire: no namespace": (lambda c, n: c.acquire(n.id, NAMES), "namespace must be a Namespace"),
    "put: parent as text": (lambda c, n: c.put(n, NAMES, DATA, parent=TEXT), "parent must be bytes.*fromhex"),
    "put: parent missing": (lambda c, n: c.put(n, NAMES, DATA, parent=None), "parent must be bytes"),
    "put: session of bytes": (lambda c, n: c.put(n, NAMES, DATA, session=b"s"), "session must be a str"),
    "put: half a character": (lambda c, n: c.put(n, NAMES, DATA, session="\ud800"), "session has characters"),
    "put: deadline as text": (
        lambda c, n: c.put(n, NAMES, DATA, deadline_s="1"),
        "deadline_s must be a number",
    ),
    "put: prefill as text": (lambda c, n: c.put(n, NAMES, DATA, prefill_s="1"), "prefill_s must be a number"),
    "put: prefill of nothing": (
        lambda c, n: c.put(n, NAMES, DATA, prefill_s=float("nan")),
        "prefill_s must be a number",
    ),
    "put: one retention": (
        lambda c, n: c.put(n, NAMES, DATA, retention=Retention(5)),
        "retention must be a list of Retention",
    ),
    "put: other retention": (
        lambda c, n: c.put(n, NAMES, DATA, retention=[{"priority": 5}]),
        "each of retention must be a Retention",
    ),
    "put: no data": (lambda c, n: c.put(n, NAMES, None), "NoneType has no buffer"),
    "put: data as text": (lambda c, n: c.put(n, NAMES, "x" * 2 * BLOCK), "str has no buffer"),
    "put: strided": (lambda c, n: c.put(n, NAMES, STRIDED), "contiguous"),
    "put: numbers for buffers": (lambda c, n: c.put(n, NAMES, [1, 2]), "int has no buffer"),
    "put: objects": (
        lambda c, n: c.put(n, NAMES, np.empty(2 * BLOCK // 8, object)),
        "holds pointers",
    ),
    "put: pieces of lists": (lambda c, n: c.put(n, NAMES, KV.Pieces([[1], [2]], BLOCK)), "int64 array"),
    "put: half pieces": (
        lambda c, n: c.put(n, NAMES, KV.Pieces(np.zeros((2, 1), np.int64), 0.5)),
        "piece_bytes must be a whole number",
    ),
    "get: into a number": (lambda c, n: c.get(n, NAMES, 5), "int has no buffer"),
    "get: into text": (lambda c, n: c.get(n, NAMES[:1], "x" * BLOCK), "str has no buffer"),
    "get: strided": (lambda c, n: c.get(n, NAMES, STRIDED), "contiguous"),
    "get: objects": (lambda c, n: c.get(n, NAMES[:1], np.empty(BLOCK // 8, object)), "holds pointers"),
    "get: half a block": (
        lambda c, n: c.get(n, NAMES, first_block=0.5),
        "first_block must be a whole number",
    ),
    "acquire: no blocks": (lambda c, n: c.acquire(n, []), "one prefix hash at least"),
    "get: a negative block": (lambda c, n: c.get(n, NAMES, first_block=-1), "first_block is -1"),
    "get: a block as text": (
        lambda c, n: c.get(n, NAMES, first_block="1"),
        "first_block must be a whole number",
    ),
    "get: session of bytes": (lambda c, n: c.get(n, NAMES, session=b"s"), "session must be a str"),
    "get one: session of bytes": (
        lambda c, n: c.get(n, NAMES[:1], ONE, session=b"s"),
        "session must be a str",
    ),
    "get one: half a character": (
        lambda c, n: c.get(n, NAMES[:1], ONE, session="\ud800"),
        "session has characters",
    ),
    "get: urgency as text": (
        lambda c, n: c.get(n, NAMES, urgency="decoding"),
        "urgency must be one of.*DECODING",
    ),
    "get: deadline as text": (lambda c, n: c.get(n, NAMES, deadline_s="1"), "deadline_s must be a number"),
    "acquire: urgency of no kind": (lambda c, n: c.acquire(n, NAMES, urgency=99), "urgency must be one of"),
    "acquire: ttl as text": (lambda c, n: c.acquire(n, NAMES, ttl_s="60"), "ttl_s must be a number"),
    "acquire: a negative ttl": (
        lambda c, n: c.acquire(n, NAMES, ttl_s=-1),
        "ttl_s must be a number of at least 0",
    ),
    "acquire: half a block": (
        lambda c, n: c.acquire(n, NAMES, first_block=0.5),
        "first_block must be a whole",
    ),
    "pin: ttl as text": (lambda c, n: c.pin(n, NAMES, "60"), "ttl_s must be a number"),
    "pin: no ttl": (lambda c, n: c.pin(n, NAMES, float("nan")), "ttl_s must be a number"),
    "pin: tier of another name": (lambda c, n: c.pin(n, NAMES, 1.0, "disk"), "tier must be one of.*dram"),
    "prefetch: tier of no kind": (lambda c, n: c.prefetch(n, NAMES, 9), "tier must be one of"),
    "prefetch: deadline as text": (
        lambda c, n: c.prefetch(n, NAMES, deadline_s="1"),
        "deadline_s must be a number",
    ),
    "session: a number": (lambda c, n: c.session(17), "session_id must be a str"),
    "session: urgency as text": (lambda c, n: c.session("s", "idle"), "urgency must be one of"),
    "session: back as text": (lambda c, n: c.session("s", back_in_s="1"), "back_in_s must be a number"),
    "session: tokens": (
        lambda c, n: c.session("s").update(Urgency.IDLE, num_decoded_tokens=1.5),
        "num_decoded_tokens must be a whole number",
    ),
    "session: fewer than no tokens": (
        lambda c, n: c.session("s").update(Urgency.IDLE, num_decoded_tokens=-1),
        "num_decoded_tokens must be at least 0",
    ),
    "session: fork of a number": (lambda c, n: c.session("s").fork(5), "new_session_id must be a str"),
    "staging: half a byte": (lambda c, n: c.staging(0.5), "num_bytes must be a whole number"),
    "staging: less than nothing": (lambda c, n: c.staging(-1), "num_bytes must be at least 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument(client: Any, namespace: Namespace, what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(InvalidRequest, match=words):
        call(client, namespace)


def test_wrong_arguments_of_a_lease(client: Any, namespace: Namespace) -> None:
    with client.acquire(namespace, NAMES) as lease:
        assert lease.wait() == 2
        wrong: list[tuple[Callable[[], Any], str]] = [
            (lambda: lease.view([0], 0), "block must be a whole number"),
            (lambda: lease.view(0, "0"), "group must be a whole number"),
            (lambda: lease.extend("1"), "ttl_s must be a number"),
            (lambda: lease.extend(-1), "ttl_s must be a number of at least 0"),
        ]
        for call, words in wrong:
            with pytest.raises(InvalidRequest, match=words):
                call()


def test_the_next_call_is_none_the_worse(client: Any, namespace: Namespace) -> None:
    assert client.get(namespace, NAMES).num_blocks == 2
    assert client.get(namespace, [np.frombuffer(name, np.uint8) for name in NAMES]).num_blocks == 2


#: What needs no appliance.
MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "a digest as text": (
        lambda: KV.NamespaceIdentity(DIGEST.hex(), GEOMETRY),
        "model_digest must be bytes.*fromhex",
    ),
    "an adapter as text": (
        lambda: KV.NamespaceIdentity(DIGEST, GEOMETRY, DIGEST.hex()),
        "adapter_digest must be",
    ),
    "a profile as text": (
        lambda: KV.NamespaceIdentity(DIGEST, GEOMETRY, profile_digest=DIGEST.hex()),
        "profile_digest must be bytes",
    ),
    "no geometry": (lambda: KV.NamespaceIdentity(DIGEST, None), "geometry must be a Geometry"),
    "a shard of numbers": (
        lambda: KV.NamespaceIdentity(DIGEST, GEOMETRY, shard=(0, 2)),
        "shard must be a str",
    ),
    "layers as text": (lambda: KV.Geometry("2", 2, 64, 16, "bfloat16"), "num_layers must be a whole number"),
    "half a head": (lambda: KV.Geometry(2, 0.5, 64, 16, "bfloat16"), "num_kv_heads must be a whole number"),
    "a type, not its name": (lambda: KV.Geometry(2, 2, 64, 16, np.float16), "dtype must be a str"),
    "parent as text": (lambda: KV.prefix_hashes(GEOMETRY, range(16), parent=TEXT), "parent must be bytes"),
    "keys of numbers": (lambda: KV.prefix_hashes(GEOMETRY, range(16), extra_keys=[5]), "each of extra_keys"),
    "no keys": (lambda: KV.prefix_hashes(GEOMETRY, range(16), extra_keys=5), "extra_keys"),
    "names of no geometry": (lambda: KV.prefix_hashes(16, range(16)), "where must be a Namespace"),
    "tokens of floats": (lambda: KV.prefix_hashes(GEOMETRY, [0.5] * 16), "tokens must be"),
    "negative tokens": (lambda: KV.prefix_hashes(GEOMETRY, [-1] * 16), "tokens must be"),
    "tokens as text": (lambda: KV.prefix_hashes(GEOMETRY, "sixteen letters!"), "tokens must be"),
    "tokens in batches": (lambda: KV.prefix_hashes(GEOMETRY, [[1] * 16]), "tokens must be"),
    "a speed as text": (lambda: KV.PrefillSpeed("fast"), "tokens_per_s must be a number"),
    "a priority as text": (lambda: KV.Retention("high"), "priority must be a whole number"),
    "a ttl as text": (lambda: KV.Retention(5, ttl_s="1"), "ttl_s must be a number"),
    "a timeout as text": (lambda: KV.Timeout(call_s="1"), "call_s must be a number"),
    "a negative timeout": (lambda: KV.Timeout(connect_s=-1), "connect_s must be a number of at least 0"),
    "attempts as text": (lambda: KV.Retry(num_attempts="2"), "num_attempts must be a whole number"),
    "no chunk": (lambda: KV.Limits(chunk_bytes=0), "chunk_bytes must be at least 1"),
    "a number for a target": (lambda: KV.Client(50051), "target must be a str"),
    "seconds for a timeout": (lambda: KV.Client("unix:///k", timeout=5.0), "timeout must be a Timeout"),
    "a number for a name": (lambda: KV.AsyncClient("unix:///k", name=5), "name must be a str"),
    "a fake of a number": (lambda: FakeAppliance().client(name=5), "name must be a str"),
}


@pytest.mark.parametrize("what", MADE)
def test_a_value_that_cannot_be_made(what: str) -> None:
    make, words = MADE[what]
    with pytest.raises(InvalidRequest, match=words):
        make()


@pytest.mark.parametrize("target", ["nowhere", "http://node:50051", "node:port", "node:99999"])
def test_a_target_that_is_no_address(target: str) -> None:
    with (
        Client(target) as client,
        pytest.raises(InvalidRequest, match="write unix:///absolute/path or") as raised,
    ):
        client.info  # noqa: B018
    assert raised.value.reason == "BAD_TARGET"
