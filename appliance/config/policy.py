"""The `policy:` section of the settings: policies by name, with their options.

policy:
  eviction: lru
  allowed_modules: [acme.kv]
  tiers: {hbm: {eviction: "acme.kv:OurEviction"}}
  options: {lru: {...}}
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from ...policies.costs import CostModel
from ...policies.registry import (
    ADMISSION,
    EVICTION,
    PREFETCH,
    Factory,
    PolicyChoice,
    UnknownPolicy,
    build,
    resolve,
)
from ...tiers.block import Tier
from ...tiers.ladder import STANDARD
from ..core.catalog.catalog import Catalog
from ..core.catalog.policy_facts import PolicyFacts
from ..core.options import PlannerOptions
from .fields import Section, refuse

DEFAULT = PolicyChoice(eviction="urgency", prefetch="announced")


class TierPolicy(Section):
    """Policies of one tier; an empty one is that of all tiers."""

    eviction: str = ""
    """Eviction policy of this tier."""
    admission: str = ""
    """Admission policy of this tier."""


class Policy(Section):
    """Policies by name. An unknown name is refused with the known ones; `module:Class` names your own."""

    eviction: str = DEFAULT.eviction
    """Eviction policy of the memory tiers. Change it when `kvtier replay` of a recorded trace shows more hits
    with another."""
    admission: str = DEFAULT.admission
    """Admission policy: decides which blocks enter a tier, before a spill and where no slower tier exists.
    Set `urgency` when spills of blocks that are never read wear the device."""
    prefetch: str = DEFAULT.prefetch
    """Prefetch policy. `announced`: blocks of sessions that sent `back_in_s`; `turns`: also sessions
    predicted to return; empty: none. Set `turns` for chat traffic."""
    tiers: dict[str, TierPolicy] = {}
    """Exceptions by tier: hbm, dram, nvme. Set when a replay shows that tiers need different policies."""
    options: dict[str, dict[str, Any]] = {}
    """Options by policy name; a policy's documentation lists them."""
    allowed_modules: list[str] = []
    """Python modules (and their submodules) from which classes may be named as policies. Set it to use your
    own."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        self._check("eviction", EVICTION, self.eviction, is_needed=True)
        self._check("admission", ADMISSION, self.admission, is_needed=True)
        self._check("prefetch", PREFETCH, self.prefetch)
        known_tiers = [tier.label for tier in (Tier.HBM, Tier.DRAM, Tier.NVME)]
        for label, of_tier in self.tiers.items():
            if label not in known_tiers:
                refuse("tiers", f"no tier {label!r}; known: {', '.join(known_tiers)}")
            self._check("tiers", EVICTION, of_tier.eviction)
            self._check("tiers", ADMISSION, of_tier.admission)
        known_names = sorted({*EVICTION, *ADMISSION, *PREFETCH, *self._own()})
        for name in self.options:
            if name not in known_names:
                refuse("options", f"no policy {name!r} has options; known: {', '.join(known_names)}")
        return self

    def _own(self) -> set[str]:
        """Return the names of policies that are not built in: `module:Class`."""
        named = [self.eviction, self.admission, self.prefetch]
        named += [name for of in self.tiers.values() for name in (of.eviction, of.admission)]
        return {name for name in named if ":" in name}

    def _check(self, key: str, known: Mapping[str, Factory], name: str, *, is_needed: bool = False) -> None:
        try:
            if name or is_needed:
                resolve(known, name, self.allowed_modules)
        except UnknownPolicy as error:
            refuse(key, str(error))

    def objection(self) -> str:
        """Return why the policies cannot be built, empty when they can. Runs the code of allowed modules."""
        facts, options = PolicyFacts(Catalog(), b""), PlannerOptions()
        costs = CostModel(options.default_bandwidth_bytes_per_s, options.default_latency_s)
        try:
            build(self.choice(), facts, costs, dict.fromkeys((Tier.HBM, Tier.DRAM, Tier.NVME), 1 << 30))
        except ValueError as problem:
            return str(problem)
        return ""

    def choice(self) -> PolicyChoice:
        """Return what the planner builds its policies from."""
        tiers = {STANDARD.named(label): of_tier for label, of_tier in self.tiers.items()}
        return PolicyChoice(
            eviction=self.eviction,
            admission=self.admission,
            prefetch=self.prefetch,
            eviction_of={tier: of.eviction for tier, of in tiers.items() if of.eviction},
            admission_of={tier: of.admission for tier, of in tiers.items() if of.admission},
            options=self.options,
            allowed_modules=tuple(self.allowed_modules),
        )
