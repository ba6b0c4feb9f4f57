"""Commands against a scripted daemon: text, JSON, exit codes, and who hears what."""

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest

from kvtier.appliance.cli.app import cli
from kvtier.appliance.cli.inspect import outline
from kvtier.appliance.cli.status import BAR_CELLS, cells
from kvtier.v1 import admin_pb2, types_pb2

from ..daemon import set_words
from .conftest import GIB, ScriptedAdmin, run, serving, status

READING = [
    ["status"],
    ["inspect", "block", "1:5f3a9c01"],
    ["inspect", "session", "s"],
    ["inspect", "lease", "17"],
    ["inspect", "segment", "3"],
    ["story", "block", "1:5f3a9c01"],
    ["story", "session", "s"],
    ["tenant", "list"],
]
CHANGING = [["evict", "dram", "1GiB"], ["drain", "--grace", "1s"], ["tenant", "erase", "acme", "--yes"]]


@pytest.mark.parametrize("arguments", READING + CHANGING, ids=" ".join)
def test_every_verb_answers_in_text_and_in_json(
    arguments: list[str], scripted: ScriptedAdmin, target: str
) -> None:
    text = run(*arguments, target=target)
    assert (text.exit_code, text.stderr) == (0, "")
    assert text.stdout.strip()
    answer = run(*arguments, "--json", target=target)
    assert answer.exit_code == 0
    assert isinstance(json.loads(answer.stdout), dict)
    assert "\x1b" not in text.stdout + answer.stdout


@pytest.mark.parametrize("arguments", READING + CHANGING, ids=" ".join)
def test_nobody_there_is_exit_code_3_and_says_what_to_do(arguments: list[str], target: str) -> None:
    result = run(*arguments, "--json", target=target)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert target in result.stderr
    assert "kvtier serve" in result.stderr


def test_status_waits_for_a_daemon_that_is_starting(target: str) -> None:
    path = target.removeprefix("unix://")
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as starting:
        starting.bind(path)
        starting.listen()
        waiting = pool.submit(run, "status", "--wait", "60s", target=target)
        starting.settimeout(60.0)
        starting.accept()[0].close()  # it has asked, and was not answered
        starting.close()
        Path(path).unlink()
        with serving(target):
            result = waiting.result()
    assert (result.exit_code, result.stderr) == (0, "")
    assert target in result.stdout


def test_waiting_for_a_daemon_ends(target: str) -> None:
    result = run("status", "--wait", "300ms", target=target)
    assert result.exit_code == 3
    assert "kvtier status --wait" in result.stderr


def test_a_refusal_is_exit_code_1_with_the_daemons_own_sentence(scripted: ScriptedAdmin, target: str) -> None:
    scripted.refusal = types_pb2.ErrorDetail(code=5, reason="NOTHING_THERE", message="no such lease")
    result = run("inspect", "lease", "17", target=target)
    assert result.exit_code == 1
    assert result.stderr == "Error: NOTHING_THERE: no such lease\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "block", "5f3a9c01"],
        ["inspect", "block", "1:5f3a"],
        ["inspect", "block", "1:5f3a9c011"],
        ["inspect", "block", "0:5f3a9c01"],
        ["inspect", "lease", "0"],
        ["objects", "ls", "nonsense"],
        ["inspect", "segment", "-1"],
        ["evict", "dram", "0"],
        ["evict", "dram", "much"],
        ["evict", "dram", "1GiB", "--namespace", "1"],
        ["evict", "dram", "all", "--namespace", "0"],
        ["top", "--interval", "1ms"],
        ["top", "--interval", "often"],
        ["record", "--out", "x", "--for", "long"],
        ["bench", "--volume", "1MiB"],
        ["bench", "--volume", "much"],
        ["bench", "--sizes", "64KiB,much"],
        ["drain", "--grace", "soon"],
        ["status", "--target", "http://x"],
        ["bench", "--sizes", "1KB"],
        ["bench", "--sizes", "64MiB", "--volume", "64MiB"],
        ["serve", "--set", "tiers.dram.capcity=1GiB", "--check"],
        ["serve", "--listen", "nowhere", "--check"],
        ["serve", "--policy", "absent.yaml", "--check"],
        ["doctor", "--set", "limits.max_pinned=0%"],
        ["dance"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_with_nothing_on_stdout(arguments: list[str], target: str) -> None:
    result = run(*arguments, target=target)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize(
    "wrong", [("--set", "tiers.dram.capcity=1GiB"), ("--listen", "nowhere")], ids=" ".join
)
def test_serve_with_wrong_settings_ends_with_exit_code_2(wrong: tuple[str, str]) -> None:
    """Its process becomes the supervisor before it reads settings; the daemon reads them."""
    command = [sys.executable, "-m", "kvtier.appliance.cli", "serve", *wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert wrong[1].split("=")[0].rsplit(".", 1)[-1] in done.stderr


def test_requests_say_what_was_meant(scripted: ScriptedAdmin, target: str) -> None:
    run("inspect", "block", "258:5F3A9C01ff", target=target)
    run("evict", "nvme", "1.5GiB", target=target)
    run("evict", "hbm", "all", target=target)
    run("drain", "--grace", "1m", "--exit", target=target)
    block, some, everything, drain = scripted.requests
    assert (block.block.namespace_id, block.block.prefix_hash.hex()) == (258, "5f3a9c01ff")
    assert (some.tier, some.bytes) == (types_pb2.TIER_NVME, 3 * GIB // 2)
    assert (everything.tier, everything.bytes) == (types_pb2.TIER_HBM, 0)
    assert (drain.exit, drain.grace_ms) == (True, 60_000)


def test_names_in_the_json_of_status_are_stable(scripted: ScriptedAdmin, target: str) -> None:
    answer = json.loads(run("status", "--json", target=target).stdout)
    assert list(answer) == [
        "target",
        "version",
        "epoch",
        "uptime_s",
        "draining",
        "tiers",
        "edges",
        "num_blocks",
        "num_sessions",
        "num_leases",
        "num_clients",
        "num_namespaces",
        "counters",
        "policy",
        "encryption",
        "codec_speeds",
        "writes",
        "ladder",
        "scrubs",
        "source",
        "hosts",
        "directory",
    ]
    assert answer["epoch"] == 1 << 62  # a number, exact
    assert answer["draining"] is False  # present although unset on the wire
    assert answer["tiers"][0] == {
        "tier": "dram",
        "backend": "sealed memfd",
        "capacity_bytes": 4 * GIB,
        "used_bytes": 2 * GIB,
        "reserved_bytes": GIB // 2,
        "condemned_bytes": 1,
        "pinned_bytes": GIB,
        "num_fragments": 4096,
        "is_offline": False,
    }
    assert answer["edges"][0]["bandwidth_bytes_per_s"] == 2.5e9
    assert answer["counters"] == {"evicted_dram": 12, "stored_dram": 4096}
    story = json.loads(run("story", "session", "s", "--json", target=target).stdout)
    line = {"at_s": 1.5, "what": "evicted from [dram]", "why": "watermark"}
    assert story == {"lines": [line], "uptime_s": 97.0}
    assert json.loads(run("evict", "dram", "all", "--json", target=target).stdout) == {
        "num_blocks": 3,
        "bytes": 3 << 20,
        "num_readable": 0,
        "num_kept": {},
    }


def test_status_shows_the_numbers(scripted: ScriptedAdmin, target: str) -> None:
    scripted.status.draining = True
    text = run("status", target=target).stdout
    counts = "4,096 blocks, 1 namespace, 2 clients, 0 sessions, 0 leases"
    for words in ("up 1h2m5s", "DRAINING", "2.5 GiB of 4 GiB", "63%", "dram → nvme", "2.50", counts):
        assert words in text
    assert re.search(r"exponents +bfloat16 +15\.7 GB/s\n *planes +bfloat16 +not", text)
    assert text.count("█") == BAR_CELLS // 4 + 1  # a quarter is pinned; one more in the legend


def test_status_says_what_is_only_in_memory_and_what_may_be_written(
    scripted: ScriptedAdmin, target: str
) -> None:
    assert "only in memory" not in run("status", target=target).stdout  # without nvme
    writes = scripted.status.writes
    writes.mode, writes.written_bytes = "idle", 3 * GIB
    writes.num_blocks_only_in_memory, writes.only_in_memory_bytes = 32, 2 << 20
    text = " ".join(run("status", target=target).stdout.split())
    said = "only in memory: 32 blocks, 2 MiB; written to nvme in 24 h: 3 GiB (write: idle, no limit)"
    assert said in text
    writes.daily_bytes, writes.is_overdrawn = GIB, True
    text = " ".join(run("status", target=target).stdout.split())
    assert "(write: idle, 0 B left of 1 GiB a day) more than tiers.nvme.daily_writes" in text


@pytest.mark.parametrize("width", [5, 7, 40])
def test_a_bar_is_always_as_wide_as_it_should_be(width: int) -> None:
    full = status().tiers[0]
    empty = admin_pb2.TierStatus(capacity_bytes=GIB)
    nothing = admin_pb2.TierStatus()
    for tier in (full, empty, nothing):
        assert sum(count for _, count in cells(tier, width)) == width
    counts = {part.name: count for part, count in cells(full, 40)}
    assert counts == {"pinned": 10, "used": 10, "reserved": 5, "condemned": 1, "free": 14}


def test_a_story_is_printed_as_it_is(scripted: ScriptedAdmin, target: str) -> None:
    shown = run("story", "session", "s", target=target).stdout
    assert shown == "1m36s ago  evicted from [dram]  watermark\n"


def test_evict_says_what_stayed_and_what_can_still_be_read(scripted: ScriptedAdmin, target: str) -> None:
    assert run("evict", "dram", "all", target=target).stdout == "evicted 3 blocks, 3 MiB, from dram\n"
    scripted.evicted = admin_pb2.EvictResponse(
        num_blocks=4096, bytes=GIB, num_readable=96, num_kept={"pinned": 1, "read or written now": 20}
    )
    assert run("evict", "nvme", "all", target=target).stdout == (
        "evicted 4,096 blocks, 1 GiB, from nvme; 96 of them are still readable from other tiers\n"
        "kept 21 blocks: 20 read or written now, 1 pinned\n"
    )


def test_outline_nests_lists_of_mappings() -> None:
    value = {
        "lease": 17,
        "blocks": [{"hash": "5f", "pinned": True}, {}],
        "owner": None,
        "sizes": [1, 2000, 5e-6, 3588.12345],
    }
    assert outline(value) == [
        "lease  17",
        "blocks",
        "  - hash    5f",
        "    pinned  yes",
        "  - {}",
        "owner  none",
        "sizes  1, 2,000, 5e-06, 3,588.123",
    ]


def test_a_segment_that_is_not_there(tmp_path: Path) -> None:
    result = run("inspect", "segment", "3", "--data", str(tmp_path))
    assert result.exit_code == 1
    assert "has no segment 3" in result.stderr


def test_serve_check_prints_settings_that_read_back(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    first = run(
        "serve",
        "--check",
        "--listen",
        "unix:///a.sock",
        "--listen",
        "localhost:1",
        "--set",
        "reflection=false",
        "--set",
        "access.insecure=true",
    )
    assert first.exit_code == 0
    assert "- unix:///a.sock\n- localhost:1\n" in first.stdout
    policy.write_text(first.stdout)
    assert run("serve", "--check", "--policy", str(policy)).stdout == first.stdout


@pytest.mark.parametrize(
    ("pages", "huge", "refused"),
    [
        ("on", "0", "tiers.dram.hugepages: "),
        ("on", f"{9 << 40}", ""),
        ("off", "0", ""),
        ("off", f"{9 << 40}", "tiers.dram.capacity: "),
        ("auto", f"{9 << 40}", ""),
    ],
)
def test_a_successor_is_checked_against_what_is_held(
    pages: str, huge: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: `hugepages: on` beside memory of small pages passed, and no daemon could start."""
    monkeypatch.setenv("_KVTIER_HELD_BYTES", f"{9 << 40} {huge}")
    settings = ("tiers.dram.capacity=8TiB", "tiers.dram.extent=1GiB", f"tiers.dram.hugepages={pages}")
    result = run("serve", "--check", "--listen", "unix:///tmp/k.sock", *set_words(settings))
    assert (result.exit_code, result.stderr == "") == ((2, False) if refused else (0, True)), result.stderr
    assert refused in result.stderr


def test_a_refused_policy_names_file_and_line(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("leases:\n  ttl: 20m\nreflection: 7\n")
    result = run("serve", "--policy", str(policy), "--check")
    assert result.exit_code == 2
    assert f"{policy}:2: leases.ttl: 20m is longer than 10m, the longest lease" in result.stderr
    assert f"{policy}:3: reflection: must be true or false" in result.stderr


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command."""
    found = []
    for name, command in group.commands.items():
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("words", commands(cli), ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: tuple[str, ...]) -> None:
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert f"Example:\n    kvtier {' '.join(words)}" in result.stdout


def test_the_module_runs_and_a_missing_extra_names_the_pip_line(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "kvtier.appliance.cli", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout.startswith(
        "kvtier, version"
    )
    hidden = "import sys; sys.modules['rich'] = None; from kvtier.appliance.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'kvtier[server,cli]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_tenant_is_erased_when_somebody_said_so(scripted: ScriptedAdmin, target: str) -> None:
    asked = run("tenant", "erase", "acme", target=target)
    assert (asked.exit_code, scripted.requests) == (1, [])
    assert "Erase everything that acme stored?" in asked.stderr
    done = run("tenant", "erase", "group:colours", "--yes", target=target)
    assert done.stdout == "erased group:colours: its key is destroyed, 4,096 blocks forgotten\n"
    assert scripted.requests[0].name == "group:colours"
    row = run("tenant", "list", target=target).stdout.splitlines()[1].split()
    assert row[:2] == ["tenant:acme", "3"]
    assert "nvme>dram" in row


def test_verify_reads_each_tier_and_says_what_is_damaged(scripted: ScriptedAdmin, target: str) -> None:
    result = run("verify", target=target)
    assert result.exit_code == 0
    assert result.stdout == (
        "dram: 16 fragments, 2 GiB read in 2.0 s (1 GiB/s)\n"
        "nvme: 16 fragments, 2 GiB read in 2.0 s (1 GiB/s)\n"
        "nothing is damaged\n"
    )
    assert result.stderr == "dram: 1 of 2, 1 GiB in 1 s\nnvme: 1 of 2, 1 GiB in 1 s\n"
    scripted.verified.num_damaged, scripted.verified.num_lost = 2, 1
    scripted.verified.found.extend(["segment 3 page 17: wrong_checksum; block 1:5f3a9c01, lost", "one more"])
    result = run("verify", "nvme", target=target)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1:] == [
        "damaged: nvme: segment 3 page 17: wrong_checksum; block 1:5f3a9c01, lost",
        "damaged: nvme: one more",
        "2 fragments damaged, 1 block lost",
    ]
    scripted.verified.is_last = False
    assert "the daemon ended before tier nvme was verified" in run("verify", "nvme", target=target).stderr


def test_status_says_when_tiers_were_verified(scripted: ScriptedAdmin, target: str) -> None:
    shown = run("status", target=target).stdout
    assert "\nverified dram: 1 GiB in 5s, ended 0s ago\n" in shown
    nvme = "\nverified nvme: not yet; the pass under way is at 25%; 2 fragments were damaged: see the log\n"
    assert nvme in shown
