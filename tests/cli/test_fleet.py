"""`kvtier fleet` says which hosts are there, what came from each, and which of them is in trouble."""

import json

from kvtier.v1 import admin_pb2

from .conftest import ScriptedAdmin, run

HOSTS = [
    admin_pb2.HostStatus(address="10.0.0.1:7070", name="one", state="self"),
    admin_pb2.HostStatus(
        address="10.0.0.2:7070",
        name="two",
        state="live",
        num_blocks=12_345,
        bytes_per_s=1.5e9,
        num_tickets=3,
        max_tickets=16,
        counters={"fetches": 7, "bytes": 2 << 30, "refused": 4},
    ),
    admin_pb2.HostStatus(
        address="10.0.0.3:7070",
        name="three",
        state="live",
        is_paused=True,
        counters={"wrong_bytes": 1},
    ),
    admin_pb2.HostStatus(address="10.0.0.4:7070", state="down", problem="silent for 3 s"),
]
COUNTERS = {"peer_bytes_received": 2 << 30, "peer_fetches_arrived": 7, "peer_tickets_refused": 2, "stored": 9}


def test_hosts_and_their_troubles_are_shown(scripted: ScriptedAdmin, target: str) -> None:
    scripted.status.hosts.extend(HOSTS)
    scripted.status.counters.update(COUNTERS)
    text = run("fleet", target=target).stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("10.")}
    assert "self" in lines["10.0.0.1:7070"]
    for words in ("live", "12,345", "1.50", "3 of 16", "4 refused"):
        assert words in lines["10.0.0.2:7070"]
    assert "not asked just now, 1 sent other bytes" in lines["10.0.0.3:7070"]
    assert "silent for 3 s" in lines["10.0.0.4:7070"]
    assert "2 of 3 other hosts live; received 2 GiB" in text
    assert "fetches: 7 arrived" in text
    assert "tickets for others: 2 refused" in text
    assert "fleet: 2 of 3 other hosts live" in run("status", target=target).stdout


def test_json_has_stable_names(scripted: ScriptedAdmin, target: str) -> None:
    scripted.status.hosts.extend(HOSTS[1:2])
    scripted.status.counters.update(COUNTERS)
    answer = json.loads(run("fleet", "--json", target=target).stdout)
    assert answer["counters"] == {"bytes_received": 2 << 30, "fetches_arrived": 7, "tickets_refused": 2}
    [host] = answer["hosts"]
    assert (host["address"], host["state"], host["counters"]["fetches"]) == ("10.0.0.2:7070", "live", 7)


def test_a_daemon_without_other_hosts_says_what_to_set(scripted: ScriptedAdmin, target: str) -> None:
    result = run("fleet", target=target)
    assert result.exit_code == 1
    assert "peers.hosts" in result.stderr


def test_the_directory_and_what_is_wrong_with_it_are_shown(scripted: ScriptedAdmin, target: str) -> None:
    directory = scripted.status.directory
    directory.address, directory.num_hosts, directory.has_index, directory.num_indexed = (
        "redis://a",
        3,
        True,
        40,
    )
    text = run("fleet", target=target).stdout
    assert "directory redis://a answers, and named 3 other hosts; its index has 40 bundles" in text
    assert "does not work" in text
    directory.problem = "TimeoutError: no answer"
    assert "directory redis://a: TimeoutError: no answer" in run("fleet", target=target).stdout
    assert json.loads(run("fleet", "--json", target=target).stdout)["directory"]["num_indexed"] == 40
