"""Hosts that fetch from each other: what one computed another reads from its memory, the same bytes."""

import json
import os
import socket
import ssl
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.clients import NamespaceIdentity
from kvtier.tiers.codecs.base import Shape
from kvtier.v1 import admin_pb2, peer_pb2, types_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.errors import DETAIL_KEY
from kvtier.v1.peer_pb2_grpc import PeerServiceStub

from ..contracts.kv_values import values_like_kv
from ..ports import free_port
from ..security.certificates import Authority, Pair
from ..waiting import until
from .fleet_hosts import CHAIN_BLOCKS, GEOMETRY, IDENTITY, TRANSPORT, Host, data_of, fleet, names_of


def test_a_prompt_of_one_host_is_read_by_another_from_its_memory(tmp_path: Path) -> None:
    with fleet(tmp_path, 2) as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        assert second.counter("peer_fetches_arrived") > 0
        assert first.counter("peer_bytes_sent") == second.counter("peer_bytes_received") > 0
        assert first.counter("peer_tickets_issued") == first.counter("peer_tickets_sent")
        assert [host.daemon.stop() for host in (first, second)] == [0, 0]


def test_with_certificates_bytes_and_tickets_go_over_tls(tmp_path: Path) -> None:
    authority = Authority("fleet")
    tls = write_host_files(tmp_path, authority)
    with fleet(tmp_path, 2, access__tls=tls, peers__certificate_name="hosts.fleet") as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        assert second.counter("peer_fetches_arrived") > 0
        for names, answer in ((["dns:rt.example"], "NOT_A_HOST"), (["dns:hosts.fleet"], "NOTHING_THERE")):
            assert refusal_of(first.address, authority, authority.sign(*names)) == answer
        with pytest.raises(ssl.SSLError):
            read_without_a_certificate(data_port_of(first), authority)
        assert [host.daemon.stop() for host in (first, second)] == [0, 0]


def knows_codec(host: Host, codec: str) -> bool:
    """Whether a host has loaded a codec: before both ends have, nothing is encoded."""
    return codec in {one.codec for one in host.status().codec_speeds}


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("codec", ["exponents", "identity"])
def test_between_hosts_blocks_go_encoded_where_the_policy_says_so(
    tmp_path: Path, codec: str, is_encrypted: bool
) -> None:
    more = {"compression__codec": codec}
    if is_encrypted:
        more |= {"access__tls": write_host_files(tmp_path, Authority("fleet"))}
        more |= {"peers__certificate_name": "hosts.fleet"}
    whole = Shape(8, 2, 64, 8, 64, "bfloat16")
    identity = NamespaceIdentity(IDENTITY.model_digest, replace(GEOMETRY, dtype="bfloat16"))
    data = np.concatenate([values_like_kv(whole, seed) for seed in range(6)])
    data[-GEOMETRY.block_bytes :] = data_of(1)[: GEOMETRY.block_bytes]  # noise gets no shorter
    with fleet(tmp_path, 2, **more) as (first, second):
        for host in (first, second):
            host.register(identity)
            if codec != "identity":
                until(partial(knows_codec, host, codec))
        with first.client as client:
            assert client.put(client.register(identity), names_of(1, 6), data).complete
        with second.client as client:
            namespace = client.register(identity)
            until(lambda: client.get(namespace, names_of(1, 6)).num_blocks == 6)
            np.testing.assert_array_equal(client.get(namespace, names_of(1, 6)).data, data)
        assert first.counter("peer_bytes_sent") == second.counter("peer_bytes_received") > 0
        share = first.counter("peer_bytes_saved") / first.counter("peer_bytes_sent")
        is_encoded = codec == "exponents" and TRANSPORT == "tcp"  # what is pushed is not
        assert 0.1 < share < 0.6 if is_encoded else share == 0


def test_a_host_that_encrypts_gives_nothing_to_one_that_would_store_it_in_plain(tmp_path: Path) -> None:
    """A new host whose policy lacked the line wrote the blocks of all tenants of the fleet to its disk."""
    (tmp_path / "key").write_text("5a" * 32)
    (tmp_path / "key").chmod(0o600)
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        hosts = []
        for number, more in enumerate(({"encryption.master_key": str(tmp_path / "key")}, {})):
            folder = tmp_path / str(number)
            nvme = {"tiers.nvme.path": str(folder / "nvme"), "tiers.nvme.capacity": "256MiB"}
            hosts.append(Host(folder, ports[number], addresses, {**nvme, **more}))
            stack.enter_context(hosts[-1].daemon)
        first, second = hosts
        first.put(1)
        second.register()
        second.daemon.wait_for_log("this host encrypts what it stores")
        assert second.read(1) == 0
        second.put(2)
        first.register()
        until(lambda: first.read(2) == CHAIN_BLOCKS)  # what lies in plain already is no secret
        assert f"host {first.address} is not asked" in second.daemon.log.read_text()
        with grpc.insecure_channel(first.address) as channel:  # a host of before this was asked
            watch = PeerServiceStub(channel).WatchInventory
            with pytest.raises(grpc.RpcError, match="install this version on the one that asks"):
                next(watch(peer_pb2.WatchInventoryRequest(), timeout=60))
            assert next(watch(peer_pb2.WatchInventoryRequest(stores_in_plain=False), timeout=60)).epoch


def test_what_is_decoded_gets_a_ticket_where_less_urgent_fetches_get_none(tmp_path: Path) -> None:
    urgencies = types_pb2.URGENCY_IDLE, types_pb2.URGENCY_QUEUED, types_pb2.URGENCY_DECODING
    with fleet(tmp_path, 1) as (host,), host.client as client:
        host.put(1)
        taken = dict.fromkeys(urgencies, 0)
        with grpc.insecure_channel(host.address) as channel:
            stub = PeerServiceStub(channel)
            for urgency in urgencies:
                request = peer_pb2.FetchBlocksRequest(
                    epoch=client.info.epoch,
                    namespace_digest=IDENTITY.digest,
                    prefix_hashes=names_of(1)[0],
                    deadline_ms=60_000,
                    urgency=urgency,
                )
                try:
                    while taken[urgency] < 1000:  # none is used; each is held for some seconds
                        assert stub.FetchBlocks(request, timeout=60).ticket
                        taken[urgency] += 1
                except grpc.RpcError as error:
                    refusal: Any = error
                    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert all(0 < number < 1000 for number in taken.values()), taken


def read_without_a_certificate(port: int, authority: Authority) -> bytes:
    """Return the first byte of a data connection."""
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    connection = socket.create_connection(("127.0.0.1", port), 60)
    with connection, context.wrap_socket(connection, server_hostname="hosts.fleet") as encrypted:
        return encrypted.recv(1)


def refusal_of(address: str, authority: Authority, pair: Pair) -> str:
    """Return why a caller with this certificate gets no ticket."""
    credentials = grpc.ssl_channel_credentials(authority.certificate, pair.key, pair.certificate)
    options = [("grpc.ssl_target_name_override", "hosts.fleet")]
    with grpc.secure_channel(address, credentials, options) as channel:
        request = peer_pb2.FetchBlocksRequest(epoch=1, prefix_hashes=bytes(32))
        with pytest.raises(grpc.RpcError) as failed:
            PeerServiceStub(channel).FetchBlocks(request, timeout=60)
    beside: Any = failed.value.trailing_metadata()
    return types_pb2.ErrorDetail.FromString(dict(beside)[DETAIL_KEY]).reason


def data_port_of(host: Host) -> int:
    """Return the port on which a host listens beside that of gRPC."""
    sockets = {name for name in host.daemon.open_files() if name.startswith("socket:")}
    own = [line.split() for line in listening() if f"socket:[{line.split()[9]}]" in sockets]
    ports = {int(fields[1].rpartition(":")[2], 16) for fields in own}
    (port,) = ports - {int(host.address.rpartition(":")[2])}
    return port


def listening() -> list[str]:
    """Return the lines of the kernel's table of sockets that listen."""
    return [line for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]


def write_host_files(folder: Path, authority: Authority, name: str = "hosts.fleet") -> str:
    """Write what a host needs to prove that it is one; return the section access.tls."""
    pair = authority.sign(f"dns:{name}")
    parts = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.certificate}
    for part, content in parts.items():
        (folder / f"{name}.{part}.pem").write_bytes(content)
    return "{" + ", ".join(f"{part}: {folder}/{name}.{part}.pem" for part in parts) + "}"


@pytest.mark.parametrize("how", [SIGKILL, SIGSTOP])
def test_a_host_that_is_gone_or_stands_still_holds_nothing(tmp_path: Path, how: int) -> None:
    """The third host has the prompt, too; when it has not, what is gone is a miss."""
    with fleet(tmp_path, 2) as (first, second):
        first.put(1)
        first.put(2)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        pid = first.daemon.pid
        os.kill(pid, how)
        second.read(2)  # before anything is noticed, too: whatever comes is right
        until(lambda: "is not asked" in second.daemon.log.read_text())
        second.read(2)
        second.put(3)
        assert second.read(3) == CHAIN_BLOCKS
        if how == SIGSTOP:
            os.kill(pid, SIGCONT)
            until(lambda: second.read(2) == CHAIN_BLOCKS)
        assert second.daemon.stop() == 0


def test_a_host_that_was_restarted_is_another_one(tmp_path: Path) -> None:
    with fleet(tmp_path, 2) as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        first.put(2)
        assert first.daemon.stop() == 0
        first.daemon.start()  # without what its memory held
        first.register()
        until(lambda: second.daemon.log.read_text().count("is asked from now on") == 2)
        assert second.read(2) == 0
        first.put(3)
        until(lambda: second.read(3) == CHAIN_BLOCKS)


def test_what_was_fetched_is_kept_when_its_host_is_gone(tmp_path: Path) -> None:
    with fleet(tmp_path, 3) as (first, second, third):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        until(lambda: third.read(1) == CHAIN_BLOCKS)
        first.daemon.stop(SIGKILL)
        assert [second.read(1), third.read(1)] == [CHAIN_BLOCKS, CHAIN_BLOCKS]


def test_hosts_with_another_namespace_tell_each_other_nothing(tmp_path: Path) -> None:
    other = NamespaceIdentity(b"other weights, 32 bytes of digest", GEOMETRY)
    with fleet(tmp_path, 2) as (first, second):
        first.put(1, other)
        second.register()
        first.put(2)
        until(lambda: second.read(2) == CHAIN_BLOCKS)
        assert second.read(1) == 0
        second.register(other)
        until(lambda: second.read(1, other) == CHAIN_BLOCKS)


def test_blocks_of_another_host_are_not_counted_as_the_stores(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (store := tmp_path / "store").mkdir()
    with fleet(tmp_path, 2, object__url=f"file://{store}") as (first, second):
        until(lambda: second.status().source.is_open)
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        assert second.counter("blocks_fetched") == CHAIN_BLOCKS
        source = second.status().source
        assert (source.fetches["arrived"], source.num_blocks_fetched) == (0, 0)


def test_the_page_is_told_who_holds_what_and_what_flowed(tmp_path: Path) -> None:
    with fleet(tmp_path, 2) as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        first.put(2)
        until(lambda: sum(one["num_blocks"] for one in fleet_of(second)["hosts"]) == 2 * CHAIN_BLOCKS)
        until(lambda: sum(one["num_blocks"] for one in fleet_of(first)["hosts"]) == CHAIN_BLOCKS)
        there, here = fleet_of(first), fleet_of(second)
        assert (there["held_twice"], here["held_twice"]) == (0.5, 1.0)
        assert there["sent_bytes"] == here["received_bytes"] == CHAIN_BLOCKS * GEOMETRY.block_bytes
        [host] = [one for one in here["hosts"] if one["state"] != "self"]
        assert (host["address"], host["state"], host["received_bytes"]) == (
            first.address,
            "live",
            here["received_bytes"],
        )
        assert host["bytes_per_s"] > 0
        assert first.daemon.stop() == 0
        until(lambda: [one["state"] for one in fleet_of(second)["hosts"]].count("down") == 1)
        assert fleet_of(second)["held_twice"] == 0.0


def fleet_of(host: Host) -> dict[str, Any]:
    """Return what the page draws of the fleet."""
    with grpc.insecure_channel(host.daemon.target) as channel:
        answer = AdminServiceStub(channel).GetSnapshot(admin_pb2.GetSnapshotRequest(), timeout=60)
    found: dict[str, Any] = json.loads(answer.json)["fleet"]
    return found


def test_a_host_sends_no_more_than_its_limit_and_says_no_above_it(tmp_path: Path) -> None:
    """The chain is some 60 s of the limit: the first ticket goes, the next ones are refused."""
    limit = CHAIN_BLOCKS * GEOMETRY.block_bytes // 60
    with fleet(tmp_path, 2, peers__send_limit=f"{limit}B") as (first, second):
        first.put(1)
        until(lambda: second.read(1) > 0)
        until(lambda: first.counter("peer_tickets_refused") > 0)
        sent = first.counter("peer_bytes_sent")
        assert 0 < sent < CHAIN_BLOCKS * GEOMETRY.block_bytes
        assert second.counter("peer_bytes_received") == sent
