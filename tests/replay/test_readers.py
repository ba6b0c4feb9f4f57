"""Readers: three formats, and what they say about a bad line."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvtier.appliance.replay.readers import read_trace
from kvtier.appliance.replay.report import about
from kvtier.appliance.replay.traces import NO_BLOCK, Trace, TraceError

from .traces import drawn, request, trace_of, write

GOOD = json.dumps(request(0, [1, 2, 3], 1100))


def chains(trace: Trace) -> list[list[int]]:
    """Return the blocks of every request."""
    return [trace.blocks[a:b].tolist() for a, b in zip(trace.first[:-1], trace.first[1:], strict=True)]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_requests_plain_and_gzip(tmp_path: Path, name: str) -> None:
    lines = [GOOD, "", json.dumps(request(3000, [1, 2, 9], session=7) | {"output_length": 40})]
    trace = read_trace(write(tmp_path / name, lines))
    assert chains(trace) == [[0, 1, 2], [0, 1, 3]]
    assert trace.at.tolist() == [0.0, 3.0]
    assert trace.num_tokens.tolist() == [1100, 1536]
    assert list(trace.sessions) == ["request-1", "7"]
    assert [hint.num_decoded_tokens for hint in trace.hints.values()] == [1, 40]
    assert trace.num_asked.tolist() == trace.num_filled.tolist() == [3, 3]


def test_requests_are_put_in_order_and_told_apart() -> None:
    trace = trace_of(request(5000, [3]), request(1000, [1]), request(1000, [2]), request(1000, [1, 4]))
    assert chains(trace) == [[1], [2], [1, 3], [0]]
    assert (np.diff(trace.at) > 0).all()
    assert trace.at[-1] == pytest.approx(4.0)


def is_refused(path: Path, where: str, says: str) -> None:
    """Assert that a file is refused, and that the error names its place and what is wrong."""
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{where}")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "where", "says"),
    [
        ([], "", "empty"),
        (["{}"], ":1:", "timestamp"),
        ([GOOD, "{broken"], ":2:", "not JSON"),
        ([GOOD, "", "[1, 2]"], ":3:", "instead of an object"),
        ([GOOD, json.dumps({**request(1, [1]), "timestamp": "now"})], ":2:", "milliseconds"),
        ([GOOD, json.dumps({**request(1, [1]), "timestamp": True})], ":2:", "milliseconds"),
        ([GOOD, json.dumps({**request(1, [1]), "timestamp": float("nan")})], ":2:", "milliseconds"),
        ([GOOD, json.dumps({**request(1, [1]), "input_length": -1})], ":2:", "tokens"),
        ([GOOD, json.dumps({**request(1, [1]), "hash_ids": [1.5]})], ":2:", "hash_ids"),
        ([GOOD, json.dumps({**request(1, [1]), "output_length": "long"})], ":2:", "output_length"),
        ([GOOD, json.dumps(request(1, [1], 512 * 9))], ":2:", "--block-tokens"),
        ([GOOD, json.dumps(request(1, [2, 3]))], ":2:", "--content-ids"),
        ([GOOD, json.dumps(request(1, [7, 8, 7]))], ":2:", "--content-ids"),
        (["neither,nor", "1,2"], ":1:", "not JSON"),
        (['{"kvtier_recording": 2}'], ":1:", "version 2"),
        (
            ['{"kvtier_recording": 1}', '{"at": 0, "op": "ask", "namespace": 1, "blocks": []}'],
            ":2:",
            "nowhere",
        ),
        (['{"kvtier_recording": 1}', '{"op": "ask"}'], ":2:", "no access"),
        (['{"kvtier_recording": 1}', '{"op": "session", "at": 0, "session": "a"}'], ":2:", "urgency"),
    ],
)
def test_bad_files_are_refused_with_their_line(
    tmp_path: Path, lines: list[str], where: str, says: str
) -> None:
    is_refused(write(tmp_path / "bad.txt", lines), where, says)


def test_a_file_that_breaks_off_says_where(tmp_path: Path) -> None:
    path = write(tmp_path / "whole.jsonl.gz", [GOOD] * 3000)
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="is the file whole"):
        read_trace(broken)


def test_ids_of_contents_are_chained(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", [json.dumps(request(n, ids)) for n, ids in ((0, [7, 8, 7]), (1, [8, 7]))]
    )
    assert chains(read_trace(path, content_ids=True)) == [[0, 1, 2], [3, 4]]


def test_bailian_traces_count_seconds_and_know_conversations(tmp_path: Path) -> None:
    def chat(number: int, parent: int, at_s: float, ids: list[int]) -> str:
        fields = {"chat_id": number, "parent_chat_id": parent, "type": "text", "turn": 1}
        return json.dumps(fields | request(at_s, ids, 16 * len(ids) - 1))

    lines = [
        chat(5, -1, 1.5, [1, 2]),
        chat(6, -1, 2.0, [2, 1]),
        chat(7, 5, 4.0, [1, 2, 3]),
        chat(9, 7, 5.0, [1]),
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", lines))
    assert chains(trace) == [[0, 1], [2, 3], [0, 1, 4], [0]]
    assert trace.at.tolist() == [0.0, 0.5, 2.5, 3.5]
    assert list(trace.sessions) == ["chat-5", "chat-6", "chat-5", "chat-5"]
    assert trace.namespaces[0].block_tokens == 16


def test_other_block_sizes_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [json.dumps(request(0, [1, 2, 3], 40))])
    assert read_trace(path, block_tokens=16).namespaces[0].block_tokens == 16


def test_a_stretch_is_a_trace_of_its_own() -> None:
    trace = drawn(3)
    part = trace.stretch(50, 100)
    assert part.num_requests == 50
    assert part.at[0] == 0
    assert list(part.sessions) == list(trace.sessions[50:100])
    assert part.num_tokens.tolist() == trace.num_tokens[50:100].tolist()
    first, last = int(trace.first[50]), int(trace.first[100])
    assert part.num_accesses == last - first
    assert part.num_blocks == len(np.unique(trace.blocks[first:last]))
    assert (part.parent == NO_BLOCK).all()


def test_some_requests_are_a_trace_of_their_own() -> None:
    trace = drawn(3)
    part = trace.only([2, 3, 11], "three")
    assert (part.name, part.num_requests) == ("three", 3)
    assert part.at.tolist() == (trace.at[[2, 3, 11]] - trace.at[2]).tolist()
    assert [len(chain) for chain in chains(part)] == [len(chains(trace)[request]) for request in (2, 3, 11)]


def test_names_are_prefix_hashes_and_the_same_every_time() -> None:
    trace = drawn(4, num_requests=20)
    names = trace.names()
    assert names == drawn(4, num_requests=20).names()
    assert len(set(names)) == trace.num_blocks
    assert {len(name) for name in names} == {32}


RECORDING = ['{"kvtier_recording": 1}', '{"namespace": 1, "block_tokens": 16, "block_bytes": 0}']


def access(**fields: object) -> str:
    """Return a line of a recording."""
    return json.dumps({"at": 0.5, "op": "ask", "namespace": 1, "blocks": ["a", "b"], "num_found": 1} | fields)


@pytest.mark.parametrize(
    ("lines", "where", "says"),
    [
        ([GOOD, GOOD.replace('"timestamp": 0', f'"timestamp": 1{"0" * 400}')], ":2:", "milliseconds"),
        ([GOOD, GOOD.replace('"timestamp": 0', f'"timestamp": {"9" * 5000}')], ":2:", "digits"),
        ([GOOD, '{"hash_ids": ' + "[" * 100_000], ":2:", "recursion"),
        ([GOOD, json.dumps(request(1e13, [1]))], ":2:", "another unit"),
        ([GOOD, json.dumps({**request(1, [1]), "output_length": 10**400})], ":2:", "output_length"),
        ([json.dumps(request(0, [])), json.dumps(request(9, []))], "", "names a block"),
        ([*RECORDING, access(blocks=[["a"], "b"])], ":3:", "are texts"),
        ([*RECORDING, access(parent={"a": 1})], ":3:", "are texts"),
        ([*RECORDING, access(session=7)], ":3:", "are texts"),
        ([*RECORDING, access(namespace=[1])], ":3:", "namespace is [1]"),
        ([RECORDING[0], RECORDING[1].replace("16", "1" + "0" * 30)], ":2:", "are counts"),
        (
            [*RECORDING, access(op="session", session="a", urgency="idle", num_decoded_tokens=-7)],
            ":3:",
            "no session",
        ),
        ([*RECORDING, access(op="session", session="a", urgency="idle", back_in_s=-1)], ":3:", "no session"),
    ],
)
def test_files_that_nobody_could_replay_are_refused_with_their_line(
    tmp_path: Path, lines: list[str], where: str, says: str
) -> None:
    is_refused(write(tmp_path / "bad.txt", lines), where, says)


def test_a_byte_order_mark_and_windows_newlines_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(GOOD + "\r\n", "utf-8-sig", newline="")
    assert chains(read_trace(path)) == [[0, 1, 2]]


def test_what_a_recorder_lost_is_known(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", [*RECORDING, access(), '{"at": 1, "lost": 12}']))
    assert trace.num_lost == 12
    assert "12 accesses were lost" in about(trace)


def test_a_session_without_a_name_is_one_of_its_own() -> None:
    assert list(trace_of(request(0, [1], session=""), request(1, [2])).sessions) == ["request-1", "request-2"]


def test_files_that_name_their_block_size_are_chained_and_keep_their_order(tmp_path: Path) -> None:
    """kvcache-simulator's format: times are optional, and an id may stand behind different ones."""
    lines = [
        {"block_size": 64, "hash_ids": [5, "a"], "input_length": 100},
        {"block_size": 64, "hash_ids": [6, "a"], "input_length": 128},
        {"block_size": 64, "hash_ids": [5, "a"], "input_length": 128},
    ]
    trace = read_trace(write(tmp_path / "trace.jsonl", [json.dumps(line) for line in lines]))
    assert chains(trace) == [[0, 1], [2, 3], [0, 1]]
    assert trace.namespaces[0].block_tokens == 64
    assert trace.at.tolist() == [0.0, 1.0, 2.0]
    for wrong in ({"block_size": 128}, {"block_tokens": [64, 36]}):
        with pytest.raises(TraceError, match=next(iter(wrong))):
            read_trace(
                write(tmp_path / "wrong.jsonl", [json.dumps(line) for line in [lines[0], lines[0] | wrong]])
            )
