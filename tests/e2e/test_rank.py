"""Rank: any host of a fleet says which one a prompt should go to; real daemons on loopback."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.appliance.fleet.rank_service import MAX_WAITING, RankService
from kvtier.clients import PrefillSpeed, Rank
from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.errors import DETAIL_KEY
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from kvtier.v1.local import Flag, Frame, Method, encode

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, identity
from ..security.test_matrix import with_tokens
from ..waiting import until
from .fleet_hosts import CHAIN_BLOCKS, IDENTITY, Host, fleet, names_of

SPEED = PrefillSpeed(tokens_per_s=100.0)  # so slow that fetching pays


def rank(host: Host, chain: int, queues: dict[str, float] | None = None) -> Rank:
    """Return what a host answers."""
    with host.client as client:
        return client.rank(client.register(IDENTITY, SPEED), names_of(chain), queues)


def best(host: Host, chain: int) -> str:
    """Return the address of the host that comes first; empty while all are equal."""
    first = rank(host, chain).hosts[0]
    return first.address if first.num_held == CHAIN_BLOCKS else ""


def test_every_host_names_the_one_that_has_the_prompt(tmp_path: Path) -> None:
    with fleet(tmp_path, 3) as hosts:
        first, second, third = hosts
        second.put(1)
        for host in hosts:
            until(lambda host=host: len(rank(host, 1).hosts) == 3)  # type: ignore[misc]
            until(lambda host=host: best(host, 1) == second.address)  # type: ignore[misc]
        found = rank(third, 1)
        assert {one.address for one in found.hosts} == {host.address for host in hosts}
        holder, *others = found.hosts
        assert (holder.num_held, holder.num_in_memory, holder.num_computed) == (CHAIN_BLOCKS, CHAIN_BLOCKS, 0)
        assert (holder.first_token_s, holder.is_self, found.is_guess) == (0.0, False, False)
        assert holder.load["max_tickets"] > 0
        assert 0.0 < holder.load["memory_free_share"] < 1.0
        for one in others:
            assert (one.num_held, one.num_fetched, one.num_computed) == (0, CHAIN_BLOCKS, 0)
            assert 0.0 < one.fetch_s == one.first_token_s < found.recompute_s
        queues = {host.address: 0.0 for host in (first, third)} | {second.address: 1e6}
        assert rank(first, 1, queues).hosts[-1].address == second.address
        assert [one.is_known for one in rank(first, 1, {"10.9.9.9:1": 0.0}).hosts] == [False]
        second.daemon.stop()
        until(lambda: second.address not in {one.address for one in rank(first, 1).hosts})
        assert {one.num_fetched for one in rank(first, 1).hosts} == {0}


def test_a_prompt_that_was_sent_to_a_host_is_expected_there(tmp_path: Path) -> None:
    with fleet(tmp_path, 3) as (asked, *others):
        until(lambda: len(rank(asked, 1).hosts) == 3)
        queues = {host.address: 0.0 for host in others}
        first = rank(asked, 1, queues).hosts[0].address
        busy = {address: 5.0 if address == first else 0.0 for address in queues}
        again = rank(asked, 1, busy).hosts[0]
        assert (again.address, again.num_held, again.num_computed) == (first, 0, 0)
        assert rank(asked, 2, busy).hosts[0].address != first, "another prompt is not expected there"


def test_blocks_on_another_host_s_disk_take_their_time(tmp_path: Path) -> None:
    """Drained to disk and started again: a host has its blocks there, and tells so."""
    nvme = f"{{path: {tmp_path}/nvme, capacity: 256MiB}}"
    with fleet(tmp_path, 1, tiers__nvme=nvme) as (disk,):
        disk.put(1)
        assert disk.daemon.stop() == 0
        disk.daemon.start()
        asked = Host(tmp_path / "asked", 0, [disk.address], {})
        try:
            asked.daemon.start()
            asked.register()
            until(lambda: best(asked, 1) == disk.address)
            holder = rank(asked, 1).hosts[0]
            assert (holder.num_held, holder.num_on_disk) == (CHAIN_BLOCKS, CHAIN_BLOCKS)
            assert (holder.num_in_memory, holder.num_in_unknown_tier) == (0, 0)
            assert holder.load_s == holder.first_token_s > 0.0
            assert holder.load["disk_bytes_per_s"] > 0.0
            assert disk.read(1) == CHAIN_BLOCKS
            until(lambda: rank(asked, 1).hosts[0].num_in_memory == CHAIN_BLOCKS)
        finally:
            asked.daemon.close()


NAME = bytes(range(32))
WRONG: dict[str, tuple[pb.RankRequest, str]] = {
    "no chain": (pb.RankRequest(namespace_id=1), "BAD_KEY"),
    "half a name": (pb.RankRequest(namespace_id=1, prefix_hashes=NAME[:31]), "BAD_KEY"),
    "too many blocks": (pb.RankRequest(namespace_id=1, prefix_hashes=NAME * 4097), "TOO_MANY_BLOCKS"),
    "no namespace": (pb.RankRequest(namespace_id=77, prefix_hashes=NAME), "UNKNOWN_NAMESPACE"),
    **{
        words: (pb.RankRequest(namespace_id=1, prefix_hashes=NAME, candidates=candidates), "BAD_REQUEST")
        for words, candidates in {
            "too many candidates": [pb.RankCandidate(host=str(n)) for n in range(1025)],
            "a host without a name": [pb.RankCandidate()],
            "a host with a novel for a name": [pb.RankCandidate(host="h" * 257)],
            "a queue that is no number": [pb.RankCandidate(host="a", queue_s=float("nan"))],
            "a queue without end": [pb.RankCandidate(host="a", queue_s=float("inf"))],
            "less than no queue": [pb.RankCandidate(host="a", queue_s=-1.0)],
        }.items()
    },
}


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as (host,), grpc.insecure_channel(host.daemon.target) as channel:
        stub = KVCacheServiceStub(channel)
        for words, (request, reason) in WRONG.items():
            with pytest.raises(grpc.RpcError) as failed:
                stub.Rank(request, timeout=60)
            beside: Any = failed.value.trailing_metadata()
            assert types_pb2.ErrorDetail.FromString(dict(beside)[DETAIL_KEY]).reason == reason, words
        most = [pb.RankCandidate(host=str(number)) for number in range(1024)]
        request = pb.RankRequest(namespace_id=1, prefix_hashes=NAME * 4096, candidates=most)
        assert len(stub.Rank(request, timeout=60).hosts) == 1024


def test_rankings_of_one_tenant_go_on_one_at_a_time(tmp_path: Path) -> None:
    """Before: all of them in every turn of the event loop; beside 64 hosts others waited up to a second."""
    settings = small_settings(tmp_path, tenants={"acme": {"members": [f"uid:{os.getuid()}"]}})
    under_way, most = [0], [0]

    async def counted(self: RankService, *asked: object) -> pb.RankResponse:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        for _ in range(3):
            await asyncio.sleep(0)
        under_way[0] -= 1
        return pb.RankResponse(num_blocks=1)

    with (
        pytest.MonkeyPatch.context() as patch,
        DaemonThread(settings) as served,
        RawClient(served.daemon.service.facts.local_socket_path) as client,
    ):
        patch.setattr(RankService, "_rank", counted)
        client.attach()
        request = pb.RankRequest(namespace_id=client.register().namespace_id, prefix_hashes=NAME)
        frames = [
            encode(Frame(Method.RANK, Flag.NONE, 100 + number, request.SerializeToString()))
            for number in range(200)
        ]
        served.call(lambda: client.socket.sendall(b"".join(frames)))  # one wake-up finds them all
        answers = [client.receive() for _ in frames]
        refused = [one for one in answers if one.flags & Flag.ERROR]
        told = {types_pb2.ErrorDetail.FromString(one.payload).reason for one in refused}
        assert told == {"TOO_MANY_IN_FLIGHT"}
        assert len(answers) - len(refused) >= MAX_WAITING
        assert most == [1]
        answered = client.call(Method.RANK, request, pb.RankResponse)
        assert answered.num_blocks == 1, "what has ended is given back"


def test_an_administrator_asks_for_any_tenant(tmp_path: Path) -> None:
    with with_tokens(tmp_path) as world:
        tenant = world.stub("tenant")
        number = tenant.RegisterNamespace(pb.RegisterNamespaceRequest(identity=identity())).namespace_id
        asked = pb.RankRequest(namespace_id=number, prefix_hashes=NAME)
        assert world.stub("admin").Rank(asked, timeout=60) == tenant.Rank(asked, timeout=60)
        with pytest.raises(grpc.RpcError, match=f"namespace {number} is not registered"):
            world.stub("other tenant").Rank(asked, timeout=60)
        inspect = world.stub("admin", "AdminService").Inspect
        [listed] = json.loads(inspect(admin_pb2.InspectRequest(namespace_id=0), timeout=60).json)
        assert (listed["namespace_id"], listed["tenant"]) == (number, "tenant:acme")
        assert len(bytes.fromhex(listed["namespace"])) == 32
