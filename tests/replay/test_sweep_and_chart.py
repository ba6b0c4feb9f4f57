"""Sweeps in one process and in several, the words of the command line, tables and the picture."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvtier.appliance.cli.app import cli
from kvtier.appliance.config.units import about_duration
from kvtier.appliance.observability.pictures import save
from kvtier.appliance.replay.chart import hit_chart
from kvtier.appliance.replay.setups import ModelShape, capacity_of, choice_of, single_tier
from kvtier.appliance.replay.sweep import run_setups
from kvtier.appliance.replay.traces import Trace, TraceBuilder, TraceNamespace
from kvtier.policies.registry import EVICTION, UnknownPolicy

from .traces import drawn, request, trace_of, write


def kvtier(*words: object) -> Result:
    """Run a command."""
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """A trace file of forty requests of seven conversations with one beginning."""
    turns = [(n, [*range(100 * (n % 7 + 1), 100 * (n % 7 + 1) + n // 7)]) for n in range(8, 48)]
    lines = [request(500 * n, [1, 2, 3, *own]) for n, own in turns]
    return write(tmp_path / "trace.jsonl.gz", [json.dumps(line) for line in lines])


def test_processes_and_one_process_say_the_same() -> None:
    trace = drawn(1, num_requests=60)
    setups = [single_tier("lru", capacity, trace, ModelShape()) for capacity in ("20%", "40%")]
    heard: list[list[int]] = []
    alone = run_setups(trace, setups)
    together = run_setups(trace, setups, 2, progress=lambda done: heard.append(list(done)))
    assert [o.plain() | {"cpu_s": 0} for o in alone] == [o.plain() | {"cpu_s": 0} for o in together]
    assert heard[-1] == [60, 60]


def test_capacities_and_policies_by_their_words() -> None:
    trace = trace_of(*(request(n, [n]) for n in range(200)))
    block_bytes = 64 << 20
    assert capacity_of("5%", trace, ModelShape()) == 10 * block_bytes
    assert capacity_of("0.1%", trace, ModelShape()) == block_bytes  # at least one
    assert capacity_of("64GiB", trace, ModelShape()) == 64 << 30
    assert choice_of("lru").admission == "all"
    assert choice_of("unbounded").eviction == "lru"
    assert choice_of("lru+all").eviction == "lru"
    for wrong in ("lfu2", "lru+maybe", "lru@soon"):
        with pytest.raises(UnknownPolicy, match="known"):
            choice_of(wrong)
    if "clairvoyant" in EVICTION:
        assert choice_of("clairvoyant").admission == "clairvoyant"
        assert choice_of("clairvoyant+all").admission == "all"


def test_replay_prints_a_table_and_json_and_draws(trace_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "hits.html"
    common = ("replay", trace_path, "--policy", "lru", "--policy", "unbounded", "--capacity", "20%,2GiB")
    result = kvtier(*common, "--jobs", 1, "--chart", page)
    assert result.exit_code == 0, result.output
    assert "40 requests" in result.stdout
    assert re.search(r"lru +20% +\d+\.\d\d% +\d+\.\d\d%", result.stdout)
    found = json.loads(kvtier(*common, "--jobs", 1, "--json").stdout)
    labels = [outcome["label"] for outcome in found["outcomes"]]
    assert labels == ["lru 20%", "lru 2GiB", "unbounded 100%"]
    assert 0 < found["outcomes"][0]["token_hit_ratio"] <= found["outcomes"][2]["token_hit_ratio"] < 1
    text = page.read_text("utf-8")
    assert "<svg" in text
    assert not re.search(r"(src|href)=\"(?!#)|@import|url\((?!#)", text)  # loads nothing from anywhere


def test_replay_of_tiers_prints_times(trace_path: Path) -> None:
    result = kvtier(
        "replay",
        trace_path,
        "--tiers",
        "dram=2GiB,nvme=32GiB",
        "--edge",
        "nvme>dram=6GB/s@120us",
        "--jobs",
        1,
    )
    assert result.exit_code == 0, result.output
    assert "first token" in result.stdout
    assert re.search(r"from +from", result.stdout)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policy", "nope"), "known:"),
        (("--capacity", "5 percent"), "not a size"),
        (("--capacity", "500%"), "not a share"),
        (("--tiers", "nvme=1TiB"), "no dram"),
        (("--tiers", "dram=1TiB,tape=1PiB"), "TIER=BYTES"),
        (("--edge", "dram>moon=1GB/s"), "no edge"),
        (("--edge", "dram>nvme=0GB/s"), "no bandwidth"),
        (("--model", "llama"), "LAYERSxHEADSxDIM"),
        (("--model", "0x8x128"), "Error: num_layers must be between"),
        (("--model", "8x8x128:int9"), "Error: unknown dtype 'int9'"),
        (("--layers-per-group", "99"), "Error: layers_per_group must be between"),
    ],
)
def test_wrong_words_are_usage_errors(trace_path: Path, words: tuple[str, str], says: str) -> None:
    result = kvtier("replay", trace_path, *words)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_bad_trace_fails_with_its_line(tmp_path: Path) -> None:
    result = kvtier("replay", write(tmp_path / "bad.jsonl", ["{}"]))
    assert result.exit_code == 1
    assert "bad.jsonl:1:" in result.stderr


def test_measured_edges_come_from_status(trace_path: Path, tmp_path: Path) -> None:
    measured = tmp_path / "status.json"
    edge = {"source": "nvme", "target": "dram", "bandwidth_bytes_per_s": 1e6, "latency_s": 0.5}
    measured.write_text(json.dumps({"edges": [edge]}))
    common = ("replay", trace_path, "--tiers", "dram=1GiB,nvme=32GiB", "--jobs", 1, "--json")
    slow, fast = (json.loads(kvtier(*common, *more).stdout) for more in (("--edges-from", measured), ()))
    assert slow["outcomes"][0]["block_hits"] != fast["outcomes"][0]["block_hits"]  # too slow to be worth it
    measured.write_text("{}")
    assert kvtier(*common, "--edges-from", measured).exit_code == 2


def test_policy_diff_shows_what_a_change_would_have_done(trace_path: Path, tmp_path: Path) -> None:
    small, large = tmp_path / "small.yaml", tmp_path / "large.yaml"
    small.write_text("tiers: {dram: {capacity: 512MiB}}\n")
    large.write_text("tiers: {dram: {capacity: 8GiB}}\npolicy: {eviction: lru}\n")
    result = kvtier("policy", "diff", "--replay", trace_path, small, large, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "tiers.dram.capacity: 512MiB → 8GiB" in result.stdout
    assert re.search(r"token hits .*\+\d+\.\d\d points", result.stdout)
    found = json.loads(
        kvtier("policy", "diff", "--replay", trace_path, "default", large, "--jobs", 1, "--json").stdout
    )
    assert found["changes"]["tiers.dram.capacity"] == {
        "was": "auto",
        "becomes": "8GiB",
        "needs_restart": False,
    }
    assert len(found["outcomes"]) == 2
    small.write_text("tiers: {dram: {capacity: much}}\n")
    assert kvtier("policy", "diff", "--replay", trace_path, small, large).exit_code == 2


def test_the_picture_has_a_line_per_policy_and_a_legend_in_the_order_of_their_ends() -> None:
    trace = drawn(2, num_requests=60)
    capacities = ("20%", "40%", "60%")
    setups = [
        single_tier(policy, size, trace, ModelShape()) for policy in ("lru", "lfu") for size in capacities
    ]
    outcomes = run_setups(trace, [*setups, single_tier("unbounded", "100%", trace, ModelShape())])
    (axes,) = hit_chart("a <trace>", outcomes).axes
    assert [np.shape(line.get_xdata())[0] for line in axes.get_lines()] == [3, 3, 2]
    assert [text.get_text().split("\n")[0] for text in axes.get_xticklabels()] == list(capacities)
    drawn_legend = axes.get_legend()
    assert drawn_legend is not None
    legend = [text.get_text() for text in drawn_legend.get_texts()]
    shares = [float(text.split()[1].rstrip("%")) for text in legend]
    assert legend[0].startswith("unbounded")
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<svg"), ("a.html", b"<!d")])
def test_pictures_of_every_kind(tmp_path: Path, name: str, begins: bytes) -> None:
    trace = drawn(3, num_requests=20)
    outcomes = run_setups(trace, [single_tier("lru", "50%", trace, ModelShape())])
    save(tmp_path / name, "a <trace>", hit_chart("a <trace>", outcomes))
    written = (tmp_path / name).read_bytes()
    assert written.startswith(begins)
    assert b"a <trace>" not in written


@pytest.mark.parametrize(("name", "says"), [("a.pdf", "ends in"), ("nowhere/a.png", "no folder")])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    trace_path: Path, tmp_path: Path, name: str, says: str
) -> None:
    result = kvtier("replay", trace_path, "--chart", tmp_path / name)
    assert result.exit_code == 2
    assert says in result.stderr


def test_little_prefill_saved_is_not_told_as_none(trace_path: Path) -> None:
    words = ("--policy", "unbounded", "--jobs", 1)
    [saved] = [
        one["prefill_saved_s"]
        for one in json.loads(kvtier("replay", trace_path, *words, "--json").stdout)["outcomes"]
    ]
    assert saved > 0
    assert about_duration(saved) in kvtier("replay", trace_path, *words).stdout
    assert about_duration(saved) != "0 s"


def test_without_matplotlib_the_figures_come_first_and_then_what_to_install(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "a.png"
    result = kvtier("replay", trace_path, "--capacity", "50%", "--jobs", 1, "--chart", picture)
    assert result.exit_code == 1
    assert "accesses/s" in result.stdout
    missing = "pictures need matplotlib; install it with pip install 'kvtier[charts]'"
    assert result.stderr == f"Error: {picture} was not drawn: {missing}\n"
    assert not picture.exists()
    assert kvtier("replay", trace_path, "--jobs", 1).exit_code == 0


def recorded(*namespaces: TraceNamespace, num_blocks: int = 40) -> Trace:
    """Return requests for one block each, of these namespaces in turns."""
    builder = TraceBuilder("recorded")
    for namespace in namespaces:
        builder.add_namespace(namespace)
    for number in range(num_blocks):
        where = number % len(namespaces)
        tokens = namespaces[where].block_tokens
        builder.add(number, [number], num_tokens=tokens, num_asked=1, num_filled=1, namespace=where)
    return builder.build()


@pytest.mark.parametrize("text", ["0%", "0", "1KiB", "63MiB"])
def test_a_capacity_that_holds_no_block_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no room at all|at least 64 MiB, or name the model"):
        capacity_of(text, drawn(2), ModelShape())


def test_a_capacity_beyond_the_whole_trace_costs_no_more_than_the_trace() -> None:
    """The books of 100,000 TiB would take more memory than there is."""
    setup = single_tier("lru", "100000TiB", drawn(2), ModelShape())
    assert setup.capacity_bytes == single_tier("unbounded", "100%", drawn(2), ModelShape()).capacity_bytes


def test_nobody_leaves_unbounded_room_whatever_the_sizes_of_blocks() -> None:
    trace = recorded(TraceNamespace(16, 3 << 20), TraceNamespace(16, 2 << 20), TraceNamespace(16, 48 << 10))
    [outcome] = run_setups(trace, [single_tier("unbounded", "100%", trace, ModelShape())])
    assert outcome.counters.get("evicted_dram", 0) == outcome.num_refused_blocks == 0


def test_a_recording_has_the_prefill_of_the_model_and_bytes_of_its_own() -> None:
    """Of a block's bytes alone it looked like a model of one layer, a thousand times as quick."""
    shape = ModelShape(80, 8, 128, "bfloat16")
    said, unsaid = shape.geometry(TraceNamespace(16, 5 << 20)), shape.geometry(TraceNamespace(16))
    assert said.block_bytes == unsaid.block_bytes == 5 << 20
    assert said.num_layers == unsaid.num_layers
    assert shape.geometry(TraceNamespace(16, 16 * 97)).block_bytes == 16 * 97  # of another model
    large = ModelShape(96, 96, 128, "float16")  # 4.5 MiB a token
    assert large.geometry(TraceNamespace(16, 72 << 20)).block_bytes == 72 << 20


@pytest.mark.parametrize("word", ["unbounded@announced", "unbounded+all"])
def test_unbounded_stands_alone(word: str) -> None:
    """With something behind it, it was lru in as little room as any other."""
    with pytest.raises(UnknownPolicy, match="write it alone"):
        choice_of(word)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tiers", "dram=2GiB", "--policy", "unbounded"], "bound for --capacity"),
        (["--tiers", "dram=2GiB", "--capacity", "5%"], "name one of them"),
        (["--tiers", "dram=2GiB,dram=3GiB"], "names dram twice"),
        (["--tiers", "dram=0"], "dram of 0B is too small"),
        (["--tiers", "dram=2GiB,nvme=1GiB"], "nvme of 1GiB is too small"),
        (["--block-tokens", "-5"], "range"),
    ],
)
def test_what_would_be_replayed_as_something_else_is_refused(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    path = write(tmp_path / "t.jsonl", [json.dumps(request(0, [1, 2]))])
    result = CliRunner().invoke(cli, ["replay", str(path), *arguments])
    assert result.exit_code == 2
    assert says in result.stderr.replace("\n", " ")


def test_a_picture_that_cannot_be_written_costs_no_figures(trace_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "hits.svg"
    target.symlink_to("/dev/full")
    result = kvtier("replay", trace_path, "--capacity", "50%", "--jobs", 1, "--chart", target)
    assert result.exit_code == 1
    assert "accesses/s" in result.stdout
    assert "No space left on device" in result.stderr
