"""Policies by name, and the set of them that one planner runs with.

An administrator may name a class of their own, `company.kv:MyEviction`, from modules the settings allow.
It is built with one argument, `Surroundings`, like ours, and runs in the daemon and in replay alike.
Entry points were rejected: any installed package could then change what is evicted.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..tiers.block import Tier
from ..tiers.ladder import STANDARD, Ladder
from .admission import AdmitAll
from .base import (
    AdmissionPolicy,
    BlockFacts,
    Costs,
    EvictionPolicy,
    Future,
    Observer,
    Prefetcher,
    Surroundings,
)
from .baselines.arc import ArcEviction
from .baselines.clairvoyant import ClairvoyantAdmission, ClairvoyantEviction
from .baselines.fifo import FifoEviction
from .baselines.learned_prefix import LearnedPrefixEviction
from .baselines.lfu import LfuEviction
from .baselines.lru import LruEviction
from .baselines.s3fifo import S3FifoEviction
from .baselines.tail_lru import TailLruEviction
from .guarded import GuardedAdmission, GuardedEviction, GuardedLearner, GuardedPrefetcher, Report, Trouble
from .options import BadPolicyOption
from .prefetch.announced import AnnouncedPrefetch
from .retained import RetainedAdmission, RetainedEviction
from .urgency.policy import UrgencyAdmission, UrgencyEviction

Factory: TypeAlias = Callable[[Surroundings], Any]

EVICTION: dict[str, Factory] = {
    "arc": ArcEviction,
    "clairvoyant": ClairvoyantEviction,  # in replay only
    "fifo": FifoEviction,
    "learned_prefix": LearnedPrefixEviction,
    "lfu": LfuEviction,
    "lru": LruEviction,
    "s3fifo": S3FifoEviction,
    "tail_lru": TailLruEviction,
    "urgency": UrgencyEviction,
}
ADMISSION: dict[str, Factory] = {
    "all": AdmitAll,
    "clairvoyant": ClairvoyantAdmission,
    "urgency": UrgencyAdmission,
}
PREFETCH: dict[str, Factory] = {"announced": AnnouncedPrefetch}


class UnknownPolicy(ValueError):
    """No policy of that name; the message lists those there are."""


class BrokenPolicy(ValueError):
    """A policy that cannot be built; the message says why."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Which policies to run, by name; every tier has its own instance."""

    eviction: str = "lru"
    admission: str = "all"
    prefetch: str = ""  # empty: none
    #: Options by policy name, handed to it as they are.
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Modules that `module:Class` names may come from, submodules included.
    allowed_modules: tuple[str, ...] = ()


@dataclass(slots=True)
class PolicySet:
    """The policies of one planner."""

    evictions: dict[Tier, RetainedEviction]  # of the memory tiers
    admissions: dict[Tier, AdmissionPolicy]
    prefetcher: Prefetcher | None
    #: Receivers of events, in the order in which they get them: shared learners first.
    observers: list[Observer]
    #: `Surroundings.shared` of them all; learned.py keeps what those remember.
    shared: dict[str, Any]


def resolve(known: Mapping[str, Factory], name: str, allowed_modules: Sequence[str] = ()) -> Factory:
    """Return the factory of a policy. Raises UnknownPolicy, saying what would be right.

    Runs the code of a module that is allowed and was not imported before.
    """
    if name in known:
        return known[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UnknownPolicy(f"no policy {name!r}; known: {', '.join(sorted(known))}, or module:Class")
    if not any(module == allowed or module.startswith(allowed + ".") for allowed in allowed_modules):
        raise UnknownPolicy(
            f"module {module!r} is not in policy.allowed_modules; add it there to run its code"
        )
    try:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownPolicy(f"cannot load policy {name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # an administrator's module may do anything
        raise UnknownPolicy(f"cannot load policy {name!r}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise UnknownPolicy(f"cannot load policy {name!r}: it is no class")
    return factory


def build(
    choice: PolicyChoice,
    facts: BlockFacts,
    costs: Costs,
    capacity_bytes: Mapping[Tier, int],
    future: Future | None = None,
    shared: Mapping[str, Any] | None = None,
    report: Report = lambda words, instead: None,
    ladder: Ladder = STANDARD,
) -> PolicySet:
    """Build the policies of a planner with tiers of these capacities.

    Raises UnknownPolicy, BrokenPolicy, BadPolicyOption and ReplayOnly, all of them ValueErrors.

    `shared` are learners that have learned before, for those policies that want one of their name. `report`
    hears of an administrator's own policy that failed later, and was replaced (guarded.py).
    """
    shared = dict(shared or {})

    def make(known: Mapping[str, Factory], name: str, tier: Tier) -> Any:
        options = dict(choice.options.get(name, {}))
        surroundings = Surroundings(facts, costs, tier, capacity_bytes[tier], options, shared, future, ladder)
        factory = resolve(known, name, choice.allowed_modules)
        return factory(surroundings) if name in known else _own(factory, name, surroundings, known, report)

    chosen: dict[Tier, EvictionPolicy] = {
        tier: make(EVICTION, choice.eviction, tier) for tier in capacity_bytes if tier in ladder.memory_tiers
    }
    evictions = {tier: RetainedEviction(policy, facts) for tier, policy in chosen.items()}
    admissions = {
        tier: _with_priorities(make(ADMISSION, choice.admission, tier), facts) for tier in capacity_bytes
    }
    prefetcher = make(PREFETCH, choice.prefetch, ladder.put_tier) if choice.prefetch else None
    learners = [
        one if _is_ours(one) else GuardedLearner(one, Trouble(name, "it is told nothing more", report))
        for name, one in shared.items()
        if isinstance(one, Observer)
    ]
    policies = [*chosen.values(), *evictions.values(), *([prefetcher] if prefetcher else [])]
    return PolicySet(evictions, admissions, prefetcher, [*learners, *policies], shared)


def _is_ours(learner: Observer) -> bool:
    return type(learner).__module__.startswith(f"{__package__}.")


def _with_priorities(admission: AdmissionPolicy, facts: BlockFacts) -> AdmissionPolicy:
    """Return an admission policy that compares priorities first, unless it admits everything anyhow."""
    return admission if type(admission) is AdmitAll else RetainedAdmission(admission, facts)


def _own(
    factory: Factory,
    name: str,
    surroundings: Surroundings,
    known: Mapping[str, Factory],
    report: Report,
) -> Any:
    """Return an administrator's own policy in its guard. Raises BrokenPolicy, BadPolicyOption."""
    try:
        policy = factory(surroundings)
    except BadPolicyOption:
        raise
    except (Exception, SystemExit) as error:
        raise BrokenPolicy(f"policy {name!r} cannot be built: {type(error).__name__}: {error}") from error
    contract = EvictionPolicy if known is EVICTION else AdmissionPolicy if known is ADMISSION else Prefetcher
    asked = [one for one in dir(contract) if not one.startswith("_")]
    if missing := [one for one in asked if not callable(getattr(policy, one, None))]:
        raise BrokenPolicy(
            f"policy {name!r} has no {', '.join(missing)}; derive it from {contract.__name__} of "
            "kvtier.policies.base"
        )
    if known is EVICTION:
        standby = LruEviction(replace(surroundings, options={}))
        trouble = Trouble(name, "lru goes on with its candidates", report)
        return GuardedEviction(policy, standby, surroundings.facts, trouble)
    if known is ADMISSION:
        return GuardedAdmission(policy, Trouble(name, "everything is admitted", report))
    return GuardedPrefetcher(policy, surroundings.facts, Trouble(name, "nothing is prefetched", report))
