"""Recording: a real daemon's session, written without names, says the same when it is replayed."""

import errno
import gzip
import hashlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvtier.appliance.cli import record
from kvtier.appliance.cli.app import cli
from kvtier.appliance.cli.record import Members
from kvtier.appliance.replay.readers import read_trace
from kvtier.appliance.replay.recording import Recorder
from kvtier.appliance.replay.setups import ModelShape, single_tier
from kvtier.appliance.replay.untimed import UntimedShell
from kvtier.clients import Client, Geometry, NamespaceIdentity, Urgency

from ..daemon import PATIENT, Daemon

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16")
IDENTITY = NamespaceIdentity(hashlib.sha256(b"record").digest(), GEOMETRY)
SESSION = "the-session-of-somebody"


def hashes(name: str, count: int) -> list[bytes]:
    """Return the prefix hashes of a chain."""
    return [hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(count)]


@contextmanager
def recording(daemon: Daemon, out: Path) -> Iterator[None]:
    """`kvtier record` in a process of its own; it ends with the daemon, when it has heard of everything."""
    words = ["record", "--out", str(out), "--target", daemon.target]
    command = [sys.executable, "-m", "kvtier.appliance.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith("recording unix:")
            yield
            assert daemon.stop() == 0
            _, told = process.communicate(timeout=120)
            assert process.returncode == 0, told
            assert "accesses in" in told.replace("\n", " ")
        finally:
            process.kill()


def test_a_recorded_session_says_the_same_when_replayed(daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "monday.jsonl.gz"
    first, second = hashes("first", 12), hashes("second", 8)
    with Client(daemon.target, timeout=PATIENT) as client, recording(daemon, out):
        namespace = client.register(IDENTITY)

        def put(chain: list[bytes], parent: bytes = b"") -> None:
            data = np.zeros(len(chain) * GEOMETRY.block_bytes, np.uint8)
            assert client.put(namespace, chain, data, parent=parent, session=SESSION).complete

        def get(chain: list[bytes], expected: int) -> None:
            assert client.get(namespace, chain, session=SESSION).num_loaded == expected

        get(first[:8], 0)
        put(first[:8])
        get(first[:10], 8)
        put(first[8:10], parent=first[7])
        put(first[10:], parent=first[9])  # decoded, never asked for
        get(first, 12)
        get(second, 0)
        put(second)
        get(second, 8)
        told = client.session(SESSION)
        told.update(Urgency.WAITING)
        told.end()
        client.flush()
        client.lookup(namespace, second)  # answered when what was flushed has been heard of
    trace = read_trace(out)
    asked, found = 8 + 10 + 12 + 8 + 8, 8 + 12 + 8
    outcome = UntimedShell(trace, single_tier("lru", "1GiB", trace, ModelShape())).run()
    assert outcome.problems == []
    assert (outcome.num_blocks, sum(outcome.block_hits.values())) == (asked, found)
    assert trace.num_blocks == 20
    assert trace.namespaces[0].block_bytes == GEOMETRY.block_bytes
    assert len(set(trace.sessions)) == 1
    words = [(hint.urgency.name, hint.is_end) for hint in trace.hints.values()]
    assert words == [("QUEUED", False), ("WAITING", False), ("ENDED", True)]
    _assert_nameless(gzip.decompress(out.read_bytes()), [*first, *second])


def _assert_nameless(text: bytes, names: list[bytes]) -> None:
    """Nothing in the file is, or begins as, a hash or session that was recorded."""
    assert SESSION.encode() not in text
    for name in names:
        for known in (name, hashlib.sha256(name).digest(), hashlib.blake2b(name, digest_size=8).digest()):
            assert known[:4].hex().encode() not in text
            assert known[:4] not in text


def test_two_recordings_cannot_be_compared(tmp_path: Path) -> None:
    names = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        with path.open("w") as file:
            recorder = Recorder(file)
            recorder.namespace(1, 16, 4096)
            recorder.ask(5.0, 1, SESSION, b"", hashes("same", 3), 1)
            recorder.put(6.5, 1, "", hashes("same", 1)[0], hashes("same", 3)[1:])
        access = json.loads(path.read_text().splitlines()[2])
        names.append({access["session"], *access["blocks"]})
        trace = read_trace(path)
        assert trace.at.tolist() == [0.0, 1.5]
        assert (trace.num_asked.tolist(), trace.num_filled.tolist()) == ([3, 0], [1, 2])
        assert trace.blocks.tolist() == [0, 1, 2, 1, 2]
        assert trace.parent.tolist() == [-1, 0]
    assert not names[0] & names[1]


def test_equal_hashes_of_two_namespaces_are_two_blocks(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    with path.open("w") as file:
        recorder = Recorder(file)
        for number in (1, 2):
            recorder.namespace(number, 16, 4096)
            recorder.put(0.0, number, "", b"", hashes("same", 2))
        recorder.lost(1.0, 3)
    trace = read_trace(path)
    assert trace.num_blocks == 4
    assert trace.block_namespace().tolist() == [0, 0, 1, 1]


def test_ctrl_c_ends_a_recording_well(daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "empty.jsonl.gz"
    command = [sys.executable, "-m", "kvtier.appliance.cli", "record", "--out", str(out)]
    command += ["--target", daemon.target]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("recording unix:")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert gzip.decompress(out.read_bytes()) == b'{"kvtier_recording":1}\n'


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "there.jsonl.gz"
    out.write_text("precious")
    result = CliRunner().invoke(cli, ["record", "--out", str(out)])
    assert result.exit_code == 1
    assert "is there already" in result.stderr
    assert out.read_text() == "precious"


def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    words = ["record", "--out", str(tmp_path / "none.jsonl.gz"), "--target", f"unix://{tmp_path}/nobody"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 3
    assert "kvtier serve" in result.stderr
    assert not list(tmp_path.iterdir()), "the next try may have the same name"


class FullDisk(io.FileIO):
    """A file on a disk with so many bytes left; the last write before that is a short one."""

    num_left = 20_000

    def write(self, data: Any) -> int:
        if not self.num_left:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = super().write(bytes(data)[: self.num_left])
        self.num_left -= count
        return count


def test_what_was_recorded_before_the_disk_was_full_can_be_replayed(tmp_path: Path) -> None:
    out = tmp_path / "full.jsonl.gz"
    text = Members(FullDisk(out, "xb"))
    recorder = Recorder(text)
    recorder.namespace(1, 16, 4096)

    def fill() -> None:
        with text:
            for number in range(1000):
                recorder.put(float(number), 1, "", b"", hashes(f"prompt {number}", 8))
                if number % 10 == 0:
                    text.flush()

    with pytest.raises(OSError, match="No space left"):
        fill()
    trace = read_trace(out)
    assert trace.num_requests % 10 == 1
    assert 100 < trace.num_requests < 1000


def test_a_recording_in_many_parts_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MEMBER_CHARACTERS", 1000)
    out = tmp_path / "parts.jsonl.gz"
    with Members(io.FileIO(out, "xb")) as text:
        recorder = Recorder(text)
        recorder.namespace(1, 16, 4096)
        for number in range(100):
            recorder.put(float(number), 1, "", b"", hashes(f"prompt {number}", 3))
    assert out.read_bytes().count(b"\x1f\x8b\x08") > 5
    assert read_trace(out).num_requests == 100


def test_wrong_words_write_nothing(tmp_path: Path) -> None:
    out = tmp_path / "none.jsonl.gz"
    assert CliRunner().invoke(cli, ["record", "--out", str(out), "--for", "soon"]).exit_code == 2
    assert not out.exists()
