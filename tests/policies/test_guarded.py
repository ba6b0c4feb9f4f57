"""An administrator's own policy that fails is replaced, wherever it fails, and nobody loses a block by it."""

import pytest

from kvtier.appliance.config import Policy
from kvtier.appliance.replay.setups import ModelShape, Setup, single_tier
from kvtier.appliance.replay.shell import PolicyFailed
from kvtier.appliance.replay.timed import TimedShell
from kvtier.appliance.replay.untimed import UntimedShell
from kvtier.policies.learned import pack, unpack
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.block import Tier
from tests.policies.failing import BadLearner
from tests.replay.traces import drawn

MODULE = "tests.policies.failing"
EVICTIONS = ("Failing", "Exiting", "SameForEver", "NoRow", "NoVictim", "PricesInWords", "Deaf", "Forgetful")
TRACE = drawn(11, num_requests=120)


def setup_of(capacity: str = "5%", **choice: str) -> Setup:
    """Return one tier with these policies; those of an administrator's own come from MODULE."""
    setup = single_tier("lru", capacity, TRACE, ModelShape())
    return Setup(
        "own",
        capacity,
        PolicyChoice(**choice, allowed_modules=(MODULE,)),  # type: ignore[arg-type]
        setup.capacity_bytes,
        setup.options,
        setup.shape,
    )


@pytest.mark.parametrize("name", EVICTIONS)
def test_lru_goes_on_where_an_eviction_policy_fails(name: str) -> None:
    """All of them are lru until they fail, so that lru itself says what should come of it."""
    told: list[tuple[str, str]] = []
    setup = setup_of(eviction=f"{MODULE}:{name}")
    shell = UntimedShell(TRACE, setup, on_policy_failed=lambda words, instead: told.append((words, instead)))
    outcome, lru = shell.run(), UntimedShell(TRACE, setup_of()).run()
    assert outcome.problems == []
    assert outcome.block_hits == lru.block_hits
    assert outcome.counters["evicted_dram"] == lru.counters["evicted_dram"]
    assert outcome.counters["policies_failed"] == len(told) == 1
    assert f"policy '{MODULE}:{name}' failed" in told[0][0]
    assert "lru goes on" in told[0][1]


def test_where_it_raised_is_said() -> None:
    with pytest.raises(PolicyFailed, match=r"KeyError: 'oops', failing\.py:\d+, in fail$"):
        UntimedShell(TRACE, setup_of(eviction=f"{MODULE}:Failing")).run()


def test_a_learner_that_fails_is_told_nothing_more_and_its_policy_goes_on() -> None:
    told: list[tuple[str, str]] = []
    setup = setup_of(eviction=f"{MODULE}:WithBadLearner")
    shell = UntimedShell(TRACE, setup, on_policy_failed=lambda words, instead: told.append((words, instead)))
    outcome, lru = shell.run(), UntimedShell(TRACE, setup_of()).run()
    assert outcome.problems == []
    assert (outcome.block_hits, outcome.counters["policies_failed"]) == (lru.block_hits, 1)
    [(words, instead)] = told
    assert words.startswith("policy 'habits' failed with IndexError: no such habit, failing.py:")
    assert instead == "it is told nothing more"
    learner = BadLearner()
    assert pack({"habits": learner}) == b"", "what it knows is left out, the others' is kept"
    assert unpack(b'{"format": 1, "learners": {"habits": {}}}', {"habits": learner}) == {
        "habits": "ValueError: never seen"
    }


def test_everything_is_admitted_where_admission_fails() -> None:
    setup = setup_of(admission=f"{MODULE}:FailingAdmission")
    shell = UntimedShell(TRACE, setup, on_policy_failed=lambda words, instead: None)
    outcome, plain = shell.run(), UntimedShell(TRACE, setup_of()).run()
    assert outcome.counters["policies_failed"] == 1
    assert outcome.block_hits == plain.block_hits
    assert outcome.num_refused_blocks == plain.num_refused_blocks


def test_nothing_is_prefetched_where_a_prefetcher_fails() -> None:
    sizes = {Tier.DRAM: 30 * (64 << 20), Tier.NVME: 400 * (64 << 20)}
    choice = PolicyChoice(prefetch=f"{MODULE}:ImpossiblePrefetcher", allowed_modules=(MODULE,))
    setup = Setup("own", "", choice, sizes, setup_of().options, ModelShape(), is_timed=True)
    shell = TimedShell(TRACE, setup, on_policy_failed=lambda words, instead: None)
    outcome = shell.run()
    assert outcome.problems == []
    assert outcome.counters["policies_failed"] == 1


@pytest.mark.parametrize(
    ("eviction", "says"),
    [
        (f"{MODULE}:Unbuildable", "cannot be built: LookupError: no model at hand"),
        (f"{MODULE}:ExitsWhenMade", "cannot be built: SystemExit: 2"),
        (f"{MODULE}:Something", "has no choose"),
        ("clairvoyant", "replay` only"),
        ("lru", ""),
        (f"{MODULE}:Failing", ""),
    ],
)
def test_what_cannot_be_built_is_said_before_a_daemon_needs_it(eviction: str, says: str) -> None:
    objection = Policy(eviction=eviction, allowed_modules=[MODULE]).objection()
    assert says in objection
    assert bool(says) == bool(objection)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"eviction": ""}, "no policy ''"),
        ({"admission": ""}, "no policy ''"),
        ({"options": {"urgncy": {}}}, "no policy 'urgncy' has options; known: all, announced"),
        ({"eviction": f"{MODULE}:EVICTIONS", "allowed_modules": [MODULE]}, "no attribute"),
        ({"eviction": f"{MODULE}:NUM_GOOD_ANSWERS", "allowed_modules": [MODULE]}, "it is no class"),
    ],
)
def test_a_policy_section_that_says_nothing_is_refused(section: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Policy.model_validate(section)


def test_options_of_policies_that_do_not_run_now_are_kept_for_later() -> None:
    Policy.model_validate({"eviction": "lru", "options": {"urgency": {"objective": "seconds"}}})


def test_a_module_that_raises_or_exits_is_named(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in (("kv_raises", "1 / 0"), ("kv_exits", "raise SystemExit(3)"), ("kv_typo", "def f(:")):
        with open(f"{tmp_path}/{name}.py", "w", encoding="utf-8") as file:
            file.write(code)
        with pytest.raises(ValueError, match=f"cannot load policy '{name}:X'"):
            Policy(eviction=f"{name}:X", allowed_modules=[name])
