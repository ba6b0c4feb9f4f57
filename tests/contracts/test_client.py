"""What every client of every appliance must answer. One suite, all worlds of client_worlds.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.clients import (
    InvalidRequest,
    Namespace,
    NamespaceIdentity,
    PrefillSpeed,
    PutOutcome,
    Retention,
    Tier,
    Urgency,
)

from .client_blocks import BLOCK, GEOMETRY, chain, payload
from .client_worlds import World

# --------------------------------------------------------------------------------------- namespaces


def test_info_names_server_and_limits(client: Any) -> None:
    info = client.info
    assert info.version
    assert info.epoch > 0
    assert info.max_blocks_per_request > 0


def test_same_identity_same_namespace(client: Any, namespace: Namespace, model: bytes) -> None:
    again = client.register(NamespaceIdentity(model, GEOMETRY))
    assert (again.id, again.digest) == (namespace.id, namespace.digest)
    assert len(namespace.digest) == 32
    assert namespace.fragment_bytes == (16 << 10, 16 << 10, 8 << 10)
    assert (namespace.num_groups, namespace.block_bytes) == (3, BLOCK)


def test_a_client_knows_the_digest_before_it_asks(namespace: Namespace) -> None:
    """Fake and daemon name a namespace as docs/prefix-hash.md specifies (tests/docs/test_prefix_hash.py)."""
    assert namespace.digest == namespace.identity.digest


def test_namespaces_never_share_blocks(client: Any, namespace: Namespace, model: bytes) -> None:
    client.put(namespace, chain(2), payload(2))
    other = client.register(NamespaceIdentity(model, GEOMETRY, adapter_digest=bytes(16)))
    assert other.id != namespace.id
    assert client.lookup(other, chain(2)).num_blocks == 0
    assert client.get(other, chain(2)).num_blocks == 0


# ------------------------------------------------------------------------------------- put and get


def test_nothing_stored_is_a_miss(client: Any, namespace: Namespace) -> None:
    found = client.lookup(namespace, chain(3))
    assert (found.num_blocks, found.tiers) == (0, ())
    report = client.get(namespace, chain(3))
    assert (report.num_blocks, report.num_bytes, len(report.data)) == (0, 0, 0)


def test_bytes_come_back(client: Any, namespace: Namespace) -> None:
    data = payload(6)
    report = client.put(namespace, chain(6), data)
    assert report.outcomes == [PutOutcome.STORED] * 6
    assert (report.num_stored, report.num_refused, report.complete) == (6, 0, True)
    found = client.lookup(namespace, chain(6))
    assert found.num_blocks == 6
    assert len(found.tiers) == 6
    assert all(tier <= Tier.DRAM for tier in found.tiers)
    got = client.get(namespace, chain(6))
    assert got.num_blocks == 6
    np.testing.assert_array_equal(got.data, data)


def test_one_block_into_a_buffer(client: Any, namespace: Namespace) -> None:
    data = payload(1)
    client.put(namespace, chain(1), data)
    for target in (np.zeros(BLOCK, np.uint8), bytearray(BLOCK), np.zeros(BLOCK // 4, np.float32)):
        report = client.get(namespace, chain(1), target)
        assert report.num_blocks == 1
        assert report.data is target
        assert memoryview(target).cast("B").tobytes() == data.tobytes()


def test_packed_hashes_are_hashes(client: Any, namespace: Namespace) -> None:
    data = payload(2)
    client.put(namespace, b"".join(chain(2)), data)
    np.testing.assert_array_equal(client.get(namespace, b"".join(chain(2))).data, data)


def test_one_buffer_per_block(client: Any, namespace: Namespace) -> None:
    data = payload(3).reshape(3, BLOCK)
    client.put(namespace, chain(3), [data[0].copy(), bytes(data[1]), bytearray(data[2])])
    targets = [np.zeros(BLOCK, np.uint8) for _ in range(3)]
    assert client.get(namespace, chain(3), targets).num_blocks == 3
    np.testing.assert_array_equal(np.stack(targets), data)


def test_get_ends_at_the_first_miss(client: Any, namespace: Namespace) -> None:
    data = payload(2)
    client.put(namespace, chain(2), data)
    target = np.zeros(5 * BLOCK, np.uint8)
    report = client.get(namespace, chain(5), target)
    assert (report.num_blocks, report.num_bytes) == (2, 2 * BLOCK)
    np.testing.assert_array_equal(target[: 2 * BLOCK], data)


def test_get_from_the_middle(client: Any, namespace: Namespace) -> None:
    data = payload(4)
    client.put(namespace, chain(4), data)
    report = client.get(namespace, chain(4), first_block=3)
    assert (report.num_blocks, report.first_block, report.num_loaded) == (4, 3, 1)
    np.testing.assert_array_equal(report.data, data[3 * BLOCK :])
    nothing = client.get(namespace, chain(4), first_block=4)
    assert (nothing.num_loaded, nothing.num_bytes) == (0, 0)


def test_second_put_is_deduplicated(client: Any, namespace: Namespace) -> None:
    data = payload(3)
    client.put(namespace, chain(2), data[: 2 * BLOCK])
    again = client.put(namespace, chain(3), data)
    assert again.outcomes == [PutOutcome.DEDUPLICATED, PutOutcome.DEDUPLICATED, PutOutcome.STORED]
    assert (again.num_deduplicated, again.complete) == (2, True)
    np.testing.assert_array_equal(client.get(namespace, chain(3)).data, data)


def test_put_continues_a_chain(client: Any, namespace: Namespace) -> None:
    names, data = chain(4), payload(4)
    client.put(namespace, names[:2], data[: 2 * BLOCK])
    assert client.put(namespace, names[2:], data[2 * BLOCK :], parent=names[1]).complete
    np.testing.assert_array_equal(client.get(namespace, names).data, data)


def test_put_without_its_parent_is_refused(client: Any, namespace: Namespace) -> None:
    names = chain(3)
    report = client.put(namespace, names[1:], payload(2), parent=names[0])
    assert report.outcomes == [PutOutcome.PARENT_MISSING] * 2
    assert (report.num_refused, report.complete) == (2, False)
    assert client.lookup(namespace, names).num_blocks == 0


def test_large_put_is_cut_into_pieces(world: World, namespace: Namespace) -> None:
    from kvtier.clients import Limits

    client = world.client(limits=Limits(staging_bytes=1 << 20, piece_bytes=3 * BLOCK, chunk_bytes=10_000))
    data = payload(50)
    assert client.put(namespace, chain(50), data).num_stored == 50
    np.testing.assert_array_equal(client.get(namespace, chain(50)).data, data)


def test_put_from_staging(client: Any, namespace: Namespace) -> None:
    data = payload(3)
    with client.staging(3 * BLOCK) as buffer:
        buffer.array[:] = data
        assert client.put(namespace, chain(3), buffer).num_stored == 3
    np.testing.assert_array_equal(client.get(namespace, chain(3)).data, data)


def test_clients_share_blocks(world: World, client: Any, namespace: Namespace, model: bytes) -> None:
    data = payload(2)
    client.put(namespace, chain(2), data)
    other = world.client(name="other")
    same = other.register(NamespaceIdentity(model, GEOMETRY))
    np.testing.assert_array_equal(other.get(same, chain(2)).data, data)


def test_closed_client_connects_anew(client: Any, namespace: Namespace) -> None:
    data = payload(1)
    client.put(namespace, chain(1), data)
    client.close()
    client.close()
    np.testing.assert_array_equal(client.get(namespace, chain(1)).data, data)


def test_fuller_than_full_never_gives_wrong_bytes(world: World, client: Any, namespace: Namespace) -> None:
    num_chains = 3 * world.capacity_bytes // (8 * BLOCK)
    for i in range(num_chains):
        assert client.put(namespace, chain(8, str(i)), payload(8, seed=i)).complete
    found = [client.get(namespace, chain(8, str(i))) for i in range(num_chains)]
    for i, report in enumerate(found):
        np.testing.assert_array_equal(report.data, payload(8, seed=i)[: report.num_bytes])
    assert sum(report.num_bytes for report in found) <= world.capacity_bytes
    assert found[-1].num_blocks == 8


# ------------------------------------------------------------------------------------ empty chains


def test_empty_chains(client: Any, namespace: Namespace) -> None:
    assert client.lookup(namespace, []).num_blocks == 0
    assert client.get(namespace, []).num_blocks == 0
    assert client.put(namespace, [], b"").complete
    with pytest.raises(InvalidRequest, match="one prefix hash"):
        client.acquire(namespace, [])


# ------------------------------------------------------------------------- pins, prefetch, sessions


def test_pin_and_unpin(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(2), payload(2))
    with client.pin(namespace, chain(3), ttl_s=60.0) as pin:
        assert pin.num_blocks == 2
    pin.unpin()


def test_prefetch_tells_the_stored_prefix(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(2), payload(2))
    assert client.prefetch(namespace, chain(3)).num_blocks == 2


def test_prefetch_looks_in_all_namespaces_of_the_domain(client: Any, namespace: Namespace) -> None:
    names = chain(3, "in no other test's namespace")
    client.put(namespace, names[:2], payload(2))
    client.register(replace(namespace.identity, shard="of another rank"))
    assert client.prefetch(None, names).num_blocks == 2
    assert client.prefetch(None, chain(3, "never stored")).num_blocks == 0


def test_session_from_first_turn_to_end(client: Any, namespace: Namespace) -> None:
    with client.session("talk", Urgency.PREFILL) as session:
        client.put(namespace, chain(2), payload(2), session="talk")
        session.update(Urgency.WAITING, deadline_s=3.0)
        branch = session.fork("talk-2")
        assert branch.end(archive=False) >= 0
    assert session.end() == 0
    session.fork("talk-3").end()


# ------------------------------------------------------------------------- prices, retention, returns


def test_lookup_says_what_loading_and_computing_cost(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(3), payload(3))
    found = client.lookup(namespace, chain(4))
    assert found.num_worth_loading == found.num_blocks == 3  # memory is always worth reading
    assert found.reason == ""
    assert found.load_s == 0.0
    assert found.recompute_s >= 0.0


def test_rank_of_a_daemon_without_a_fleet_is_itself(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(3), payload(3))
    found = client.rank(namespace, chain(4))
    assert (found.num_blocks, found.block_tokens, found.is_guess) == (4, 16, True)
    (own,) = found.hosts
    assert own.is_self
    assert own.is_known
    assert (own.num_held, own.num_in_memory, own.num_fetched, own.num_computed) == (3, 3, 0, 1)
    assert 0.0 < own.compute_s == own.first_token_s <= found.recompute_s


def test_rank_of_candidates(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(3), payload(3))
    own = client.rank(namespace, chain(4)).hosts[0]
    called = own.address or own.name
    ranked = client.rank(namespace, chain(4), {"10.0.0.9:7070": 0.0, called: 1000.0}).hosts
    assert [(one.address, one.is_known, one.num_held) for one in ranked[:1]] == [("10.0.0.9:7070", False, 0)]
    assert (ranked[1].is_self, ranked[1].queue_s, ranked[1].num_held) == (True, 1000.0, 3)
    assert ranked[1].first_token_s >= 1000.0
    other = chain(4, "not sent to any of them yet")
    client.put(namespace, other[:3], payload(3))
    assert client.rank(namespace, other, {called: 0.0, "10.0.0.9:7070": 0.0}).hosts[0].is_self


def test_namespace_with_a_stated_prefill_speed(client: Any, model: bytes) -> None:
    speed = PrefillSpeed(tokens_per_s=10_000.0, doubling_tokens=20_000.0)
    namespace = client.register(NamespaceIdentity(model, GEOMETRY), speed)
    assert client.put(namespace, chain(2), payload(2), prefill_s=0.01).complete
    assert client.get(namespace, chain(2), load_anyway=True).num_blocks == 2


def test_retention_of_token_ranges(client: Any, namespace: Namespace) -> None:
    tokens = GEOMETRY.block_tokens
    hints = [Retention(90, 0, tokens), Retention(10, tokens, ttl_s=60.0)]
    assert client.put(namespace, chain(3), payload(3), retention=hints).complete
    with client.acquire(namespace, chain(3), retention=[Retention(0, 2 * tokens)]) as lease:
        assert lease.wait() == 3
    with pytest.raises(InvalidRequest, match="0 to 100"):
        Retention(101)
    with pytest.raises(InvalidRequest, match="no range"):
        Retention(50, 10, 10)


def test_session_says_when_it_is_back(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(2), payload(2), session="agent")
    with client.session("agent", Urgency.WAITING, back_in_s=30.0) as session:
        session.update(Urgency.WAITING, deadline_s=60.0, back_in_s=5.0)
    assert client.get(namespace, chain(2)).num_blocks == 2


# ---------------------------------------------------------------------------------- refused calls


def test_hash_of_wrong_length(client: Any, namespace: Namespace) -> None:
    for hashes in ([b"short"], b"x" * 33):
        with pytest.raises(InvalidRequest, match="32 bytes") as raised:
            client.lookup(namespace, hashes)
        assert raised.value.reason == "BAD_KEY"


def test_data_of_wrong_size(client: Any, namespace: Namespace) -> None:
    with pytest.raises(InvalidRequest, match="2 blocks"):
        client.put(namespace, chain(2), payload(1))
    with pytest.raises(InvalidRequest, match="2 blocks"):
        client.get(namespace, chain(2), bytearray(BLOCK))
    with pytest.raises(InvalidRequest, match="read-only"):
        client.get(namespace, chain(1), bytes(BLOCK))
    with pytest.raises(InvalidRequest, match="first_block"):
        client.get(namespace, chain(1), first_block=2)


def test_more_blocks_than_one_call_may_name(client: Any, namespace: Namespace) -> None:
    too_many = bytes(32 * (client.info.max_blocks_per_request + 1))
    for ask in (client.lookup, client.rank):
        with pytest.raises(InvalidRequest) as raised:
            ask(namespace, too_many)
        assert raised.value.reason == "TOO_MANY_BLOCKS"
    with pytest.raises(InvalidRequest):
        client.rank(namespace, [])


def test_identity_of_another_domain(client: Any, model: bytes) -> None:
    with pytest.raises(InvalidRequest, match="domain"):
        client.register(NamespaceIdentity(model, GEOMETRY, domain="elsewhere"))
