"""Hosts that fetch from each other: what one computed another reads from its memory, the same bytes."""

import os
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from kvtier.clients import NamespaceIdentity

from ..security.certificates import Authority
from .fleet_hosts import CHAIN_BLOCKS, GEOMETRY, fleet, until


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
        assert [host.daemon.stop() for host in (first, second)] == [0, 0]


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
