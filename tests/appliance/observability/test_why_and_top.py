"""`kvtier why` and `kvtier top` against a real daemon."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvtier.appliance.cli.output import spread
from kvtier.appliance.cli.top import SPARKS, picture, sparks, tier_cells
from kvtier.appliance.config.units import about_duration
from kvtier.appliance.core.planner import Planner
from kvtier.clients import Client

from ...cli.conftest import run
from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Shown, Start, names, use

BUNDLE_BLOCKS = 256 // GEOMETRY.block_tokens
PAYLOAD = bytes(CHAIN_BLOCKS * GEOMETRY.block_bytes)


def fill(shown: Shown) -> None:
    """Three sessions put a chain each into a tier for less than two; without a slower one the first goes."""
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        for chain in "012":
            client.put(namespace, names(chain), PAYLOAD, session=f"agent-{chain}")


def test_why_a_session_lost_its_blocks_and_over_whom(start: Start) -> None:
    shown = start(nvme=False)
    fill(shown)
    answer = json.loads(run("why", "session", "agent-0", "--json", target=shown.target).stdout)
    assert answer["num_blocks"] == {"gone": CHAIN_BLOCKS}
    assert sum(exit_["num_blocks"] for exit_ in answer["exits"]) == CHAIN_BLOCKS
    others = {name.hex() for chain in "012" for name in names(chain)}
    assert 0 <= max(exit_["at_s"] for exit_ in answer["exits"]) <= answer["uptime_s"]
    for exit_ in answer["exits"]:
        assert exit_["tier"] == "dram"
        assert exit_["why"] == "coldest, no slower tier"
        if exit_["next_price"] is None:
            assert exit_["next_hash"] == "", "nobody else could go"
        else:
            assert exit_["price"] <= exit_["next_price"]
            assert exit_["next_hash"] in others
        assert exit_["prefix_hash"] in {name.hex() for name in names("0")}
    kept = json.loads(run("why", "session", "agent-2", "--json", target=shown.target).stdout)
    assert (kept["num_blocks"], kept["exits"]) == ({"dram": CHAIN_BLOCKS}, [])
    text = run("why", "session", "agent-0", target=shown.target).stdout
    assert f"of the {CHAIN_BLOCKS} blocks of its last chain, {CHAIN_BLOCKS} gone" in text
    assert re.search(r"^ +ago +blocks", text, re.M)
    assert re.search(r"^ *[\d.]+ (ms|s) +\d+ +dram", text, re.M)
    over = [exit_ for exit_ in answer["exits"] if exit_["next_hash"]]
    assert over
    for exit_ in over:
        assert f"{exit_['next_hash'][:8]} at {exit_['next_price']:.4g}" in text


def test_why_tells_what_the_object_store_has(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "store").mkdir()
    shared = {"url": f"file://{tmp_path / 'store'}", "share": "eager"}
    shown = start(nvme=False, dram="8MiB", objects=shared)
    source, planner = shown.daemon.source, shown.daemon.appliance.planner
    assert source is not None
    assert isinstance(planner, Planner)
    shown.until(lambda: source.status().is_open)
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        for number, chain in enumerate("0123456", start=1):  # the tier has room for five

            def is_stored(number: int = number) -> bool:
                return planner.story.counters.get("bundles_exported") == number

            client.put(namespace, names(chain), PAYLOAD, session=f"agent-{chain}")
            shown.until(is_stored)
    answers = {
        chain: json.loads(run("why", "session", f"agent-{chain}", "--json", target=shown.target).stdout)
        for chain in "0123456"
    }
    left = next(chain for chain, answer in answers.items() if "dram" not in answer["num_blocks"])
    assert answers[left]["num_blocks"] == {"store": BUNDLE_BLOCKS, "gone": CHAIN_BLOCKS - BUNDLE_BLOCKS}
    text = run("why", "session", f"agent-{left}", target=shown.target).stdout
    assert f"{BUNDLE_BLOCKS} only in the object store, {CHAIN_BLOCKS - BUNDLE_BLOCKS} gone" in text
    last = f"1:{names(left)[BUNDLE_BLOCKS - 1].hex()}"
    assert "is only in the object store" in run("why", "block", last, target=shown.target).stdout


def test_why_a_block_that_is_forgotten_left(start: Start) -> None:
    shown = start(nvme=False)
    fill(shown)
    victim = names("0")[-1]
    answer = json.loads(run("why", "block", f"1:{victim.hex()[:8]}", "--json", target=shown.target).stdout)
    assert answer["prefix_hash"] == victim.hex()
    assert answer["num_blocks"] == {"gone": 1}
    [left] = answer["exits"]
    assert left["num_blocks"] == 1
    story = run("story", "block", f"1:{victim.hex()}", target=shown.target).stdout
    assert left["next_hash"][:8] in story
    assert re.match(r" *[\d.]+ (ms|s) ago ", story)
    assert "is in no tier any more" in run("why", "block", f"1:{victim.hex()}", target=shown.target).stdout
    here = run("why", "block", f"1:{names('2')[0].hex()}", target=shown.target).stdout
    assert "is in dram; nothing is remembered" in here


def test_why_an_administrator_evicted_has_no_price(start: Start) -> None:
    shown = start(nvme=False)
    with Client(shown.target) as client:
        client.put(client.register(IDENTITY), names("0"), PAYLOAD, session="s")
    assert run("evict", "dram", "1MiB", target=shown.target).exit_code == 0
    answer = json.loads(run("why", "session", "s", "--json", target=shown.target).stdout)
    assert {exit_["why"] for exit_ in answer["exits"]} == {"administrator"}
    assert {exit_["price"] for exit_ in answer["exits"]} == {None}


@pytest.mark.parametrize(
    "name", [("session", "nobody"), ("block", "1:" + "ab" * 32), ("block", "9:" + "ab" * 4)]
)
def test_why_of_what_nobody_knows_fails(start: Start, name: tuple[str, str]) -> None:
    result = run("why", *name, target=start(nvme=False).target)
    assert result.exit_code == 1
    assert "nothing is remembered" in result.stderr


def test_a_chain_that_goes_on_is_one_chain(start: Start) -> None:
    """What a session asked for, what it put behind that, and what it read again without a call."""
    shown = start()
    half = CHAIN_BLOCKS // 2
    data = np.frombuffer(PAYLOAD, np.uint8)[: half * GEOMETRY.block_bytes]
    telemetry = shown.daemon.observability.view.telemetry
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        chain = names("0")
        client.put(namespace, chain[:half], data, session="s")
        client.put(namespace, chain[half:], data, parent=chain[half - 1], session="s")
        assert telemetry.chain_of("s")[1] == chain
        client.get(namespace, chain[:half], session="s")
    shown.served.call(lambda: None)
    assert telemetry.chain_of("s")[1] == chain
    assert telemetry.chain_of("other") == (0, [])


def test_top_draws_once_and_says_the_same_as_json(start: Start) -> None:
    shown = start()
    use(shown, session_id="agent-42")
    drawn = run("top", "--once", target=shown.target)
    assert drawn.exit_code == 0, drawn.output
    for word in ("serving", "dram", "nvme", "agent-42", "staging → dram"):
        assert word in drawn.stdout
    assert re.search("(spill|copy_ahead|idle_copy)_dram", drawn.stdout)
    snapshot = json.loads(run("top", "--once", "--json", target=shown.target).stdout)
    assert snapshot["totals"]["asked"] == 120
    assert f"of {snapshot['totals']['asked']:,} blocks" in drawn.stdout


def test_inspect_says_what_a_session_asked_for_and_saved(start: Start) -> None:
    shown = start()
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, names("0"), PAYLOAD, session="s")
        client.get(namespace, names("0", 2 * CHAIN_BLOCKS), session="s")
        session = json.loads(run("inspect", "session", "s", "--json", target=shown.target).stdout)
    assert session["num_blocks"] == CHAIN_BLOCKS
    assert (session["asked"], session["missed"]) == (2 * CHAIN_BLOCKS, CHAIN_BLOCKS)
    assert session["hit_ratio"] == 0.5
    assert session["saved_s"] > 0


def test_top_fits_any_screen(start: Start) -> None:
    shown = start()
    use(shown)
    snapshot = shown.snapshot()
    for width in (40, 80, 200):
        screen = Console(width=width, record=True, file=io.StringIO())
        screen.print(picture(snapshot, width))
        assert all(len(line) <= width for line in screen.export_text().splitlines())


def test_bars_are_to_scale_and_show_what_is_there() -> None:
    tiers = [{"capacity_bytes": 1 << 30}, {"capacity_bytes": 4 << 30}, {"capacity_bytes": 1}]
    assert tier_cells(tiers, 48) == [12, 48, 6]
    assert spread([50, 0, 25], 100, 8) == [4, 0, 2]
    assert spread([1, 1, 1], 1 << 40, 8) == [1, 1, 1]
    assert sum(spread([99, 99, 99], 297, 7)) == 7
    assert sum(spread([21, 7, 7, 7, 7, 7], 100, 10)) == 6  # before: a cell more for each of them
    assert [about_duration(s) for s in (0.0, 0.00025, 0.05, 1.0, 61.0)] == [
        "0 s",
        "0.25 ms",
        "50 ms",
        "1 s",
        "1m1s",
    ]
    assert sparks([0.0, None, 0.5, 1.0]) == f"{SPARKS[0]} {SPARKS[4]}{SPARKS[-1]}"


def test_top_without_a_daemon_is_exit_code_3(tmp_path: object) -> None:
    result = run("top", "--once", target=f"unix://{tmp_path}/none.sock")
    assert (result.exit_code, result.stdout) == (3, "")
