"""A trace over several hosts: which host is sent what, what comes from where, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.appliance.cli.app import cli
from kvtier.appliance.core.fleet.ranking import HostOffer, rank_hosts
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.replay.fleet import ROUTES, FleetOutcome, FleetReplay, FleetSetup
from kvtier.appliance.replay.setups import ModelShape, Setup, choice_of
from kvtier.appliance.replay.timed import SETTLE_S, TimedShell
from kvtier.appliance.replay.traces import Trace
from kvtier.appliance.replay.virtual import EdgeSpeed
from kvtier.appliance.replay.virtual_store import StoreModel
from kvtier.tiers.block import Tier

from .traces import drawn, request, trace_of

MIB = 1 << 20
SETUP = Setup(
    "lru", "", choice_of("lru"), {Tier.DRAM: 256 * 64 * MIB}, PlannerOptions(), ModelShape(), is_timed=True
)
NETWORK = EdgeSpeed(10e9, 0.001)


def fleet(
    trace: Trace,
    num_hosts: int,
    route: str,
    network: EdgeSpeed | None = None,
    store: StoreModel | None = None,
) -> FleetOutcome:
    outcome = FleetReplay(trace, replace(SETUP, store=store), FleetSetup(num_hosts, route, network)).run()
    assert outcome.problems == []
    shares = (outcome.own_hit_ratio, outcome.fetched_ratio, outcome.stored_ratio, outcome.computed_ratio)
    assert sum(shares) == pytest.approx(1)
    return outcome


def same_prompt(num_requests: int = 8, gap_ms: float = 60_000) -> Trace:
    return trace_of(*(request(gap_ms * n, [1, 2, 3, 4]) for n in range(num_requests)))


def seconds(first: int, count: int) -> float:
    return float(count)


def test_a_host_that_holds_the_prompt_is_first_until_its_queue_costs_more() -> None:
    holder, idle = HostOffer("holder", 6, 0.5, 6, 0.0, 0.0), HostOffer("idle", 0, 0.0, 0, 0.0, 0.0)
    first, second = rank_hosts([idle, holder], 8, seconds)
    assert (first.host, first.first_token_s, first.num_held, first.num_computed) == ("holder", 2.5, 6, 2)
    assert (second.host, second.first_token_s, second.num_computed) == ("idle", 8.0, 8)
    assert rank_hosts([holder._replace(queue_s=7.0), idle], 8, seconds)[0].host == "idle"


def test_blocks_of_others_count_where_they_arrive_before_they_are_computed() -> None:
    [fetches] = rank_hosts([HostOffer("a", 2, 0.0, 8, 1.5, 0.0)], 8, seconds)
    assert (fetches.first_token_s, fetches.num_fetched, fetches.num_computed) == (1.5, 6, 0)
    [computes] = rank_hosts([HostOffer("a", 2, 0.0, 8, 7.0, 0.0)], 8, seconds)
    assert (computes.first_token_s, computes.num_fetched, computes.num_computed) == (6.0, 0, 6)
    [waits] = rank_hosts([HostOffer("a", 2, 0.0, 8, 7.0, 9.0)], 8, seconds)
    assert (waits.first_token_s, waits.num_fetched) == (9.0, 6)


def test_what_is_new_on_a_full_host_costs_others_and_waits_count_only_where_all_hosts_have_them() -> None:
    holder = HostOffer("holder", 8, 0.0, 8, 0.0, 2.0, is_full=True)
    idle = HostOffer("idle", 0, 0.0, 8, 0.5, 0.0, is_full=True)
    assert rank_hosts([idle, holder], 8, seconds)[0].host == "holder", "8 s of blocks would leave elsewhere"
    assert rank_hosts([idle._replace(is_full=False), holder], 8, seconds)[0].host == "idle"
    late = holder._replace(queue_s=10.0, is_full=False)
    computes = HostOffer("computes", 0, 0.0, 0, 0.0, 0.5)
    assert rank_hosts([late, computes._replace(queue_s=0.0)], 8, seconds)[0].host == "computes"
    first, second = rank_hosts([late, computes], 8, seconds)
    assert (first.host, first.others_s) == ("computes", 1.0), "half a second is a sixteenth of this prompt"
    assert (second.host, second.others_s) == ("holder", 0.0)
    assert rank_hosts([late, computes._replace(queue_s=4.0)], 8, seconds)[0].host == "holder"


def test_equal_hosts_keep_their_order_and_wrong_offers_are_refused() -> None:
    offers = [HostOffer(name, 0, 0.0, 0, 0.0, 1.0) for name in "ba"]
    assert [one.host for one in rank_hosts(offers, 4, seconds)] == ["b", "a"]
    with pytest.raises(ValueError, match="b: counts and seconds"):
        rank_hosts([offers[0]._replace(queue_s=-1.0)], 4, seconds)


def test_a_fleet_of_one_hits_as_one_host() -> None:
    trace = drawn(3)
    alone = TimedShell(trace, SETUP).run()
    ratios = {route: fleet(trace, 1, route).own_hit_ratio for route in ROUTES}
    assert len(set(ratios.values())) == 1
    assert ratios["rank"] == pytest.approx(alone.token_hit_ratio, abs=0.05)  # prompts queue in a fleet


def test_rank_sends_a_prompt_where_it_is_held_and_round_robin_computes_it_everywhere() -> None:
    trace = same_prompt()
    assert fleet(trace, 4, "rank").computed_ratio == pytest.approx(1 / 8)
    assert fleet(trace, 4, "round-robin").computed_ratio == pytest.approx(4 / 8)
    assert fleet(trace, 4, "sticky").computed_ratio == pytest.approx(1 / 8)


def test_hosts_that_fetch_compute_less_and_the_network_carries_it() -> None:
    trace = same_prompt()
    without, outcome = fleet(trace, 4, "round-robin"), fleet(trace, 4, "round-robin", NETWORK)
    assert (without.network_bytes, without.fetched_ratio) == (0, 0)
    assert outcome.computed_ratio < without.computed_ratio
    assert outcome.network_bytes == round(outcome.fetched_ratio * trace.num_tokens.sum() / 512) * 64 * MIB > 0


def test_hosts_share_a_store_and_ask_each_other_first() -> None:
    prompts = [[1, 2, 3, 4], [11, 12], [21, 22], [31, 32], *([1, 2, 3, 4] for _ in range(4))]
    trace = trace_of(*(request(60_000 * n, prompt) for n, prompt in enumerate(prompts)))
    store = StoreModel(1e12, 10e9, 0.03)
    alone = fleet(trace, 4, "round-robin", store=store)
    assert (alone.has_store, alone.fetched_ratio) == (True, 0.0)
    assert alone.stored_ratio > 0, "the first host's second use stores it for the others"
    both = fleet(trace, 4, "round-robin", NETWORK, store)
    assert (both.stored_ratio, both.fetched_ratio > 0) == (0.0, True)


def test_a_prompt_finds_what_those_before_it_in_the_queue_computed() -> None:
    trace = trace_of(*(request(n, [1, 2, 3, 4]) for n in range(8)))
    assert fleet(trace, 1, "rank").computed_ratio == pytest.approx(1 / 8)
    assert fleet(trace, 4, "rank").computed_ratio == pytest.approx(1 / 8), "the same host gets all of them"


def test_a_queue_that_outlasts_the_trace_is_served() -> None:
    prompts = [[10 * n + k for k in range(8)] for n in range(400)]
    trace = trace_of(*(request(n, prompt) for n, prompt in enumerate([*prompts, prompts[-1]])))
    outcome = fleet(trace, 1, "rank")
    assert outcome.ttft_s["p99"] > SETTLE_S
    assert outcome.own_hit_ratio == pytest.approx(1 / 401)


def test_prompts_queue_at_a_host_and_least_loaded_spreads_them() -> None:
    trace = trace_of(*(request(n, [10 * n + k for k in range(8)]) for n in range(16)))
    one, four = fleet(trace, 1, "least-loaded"), fleet(trace, 4, "least-loaded")
    assert one.ttft_s["p99"] > 3 * four.ttft_s["p99"]
    assert four.imbalance == pytest.approx(1.0)


def test_a_fleet_refuses_what_it_cannot_replay() -> None:
    with pytest.raises(ValueError, match="known: round-robin"):
        fleet(same_prompt(), 2, "random")
    with pytest.raises(ValueError, match="--tiers"):
        FleetReplay(same_prompt(), replace(SETUP, is_timed=False), FleetSetup(2, "rank"))


def test_the_command_prints_a_row_for_each_route(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request(1000 * n, [n % 5, 50 + n % 5])) + "\n" for n in range(40)))
    words = ["replay", str(path), "--tiers", "dram=2GiB", "--hosts", "3"]
    printed = CliRunner().invoke(cli, words)
    assert printed.exit_code == 0, printed.output
    assert all(route in printed.output for route in ROUTES)
    run = CliRunner().invoke(cli, [*words, "--route", "rank", "--network", "2GB/s@5ms", "--json"])
    [row] = json.loads(run.stdout)["fleets"]
    picture = tmp_path / "fleet.svg"
    drawn = CliRunner().invoke(cli, [*words, "--route", "rank", "--route", "sticky", "--chart", str(picture)])
    assert drawn.exit_code == 0, drawn.output
    assert all(f">{name}, 3 hosts<" in picture.read_text() for name in ("rank", "sticky"))
    assert (row["route"], row["num_hosts"], row["problems"]) == ("rank", 3, [])
    for more, fix in (
        (["--network", "0B/s"], "no bandwidth"),
        (["--policy", "lru", "--policy", "urgency"], "one --policy"),
    ):
        refused = CliRunner().invoke(cli, [*words, *more])
        assert refused.exit_code == 2
        assert fix in refused.output
    refused = CliRunner().invoke(cli, [*words[:4], "--route", "rank"])
    assert "--hosts" in refused.output
