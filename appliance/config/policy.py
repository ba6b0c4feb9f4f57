"""The `policy:` section of the settings: who decides, by name, with their options.

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
from ..core.catalog import Catalog
from ..core.options import PlannerOptions
from ..core.policy_facts import PolicyFacts
from .fields import Section, refuse

DEFAULT = PolicyChoice(eviction="urgency", prefetch="announced")


class TierPolicy(Section):
    """Policies of one tier; what is empty is as for all tiers."""

    eviction: str = ""
    """Who leaves this tier first."""
    admission: str = ""
    """What may enter this tier."""


class Policy(Section):
    """Who decides what moves. A wrong name is refused with those there are; module:Class names one's own."""

    eviction: str = DEFAULT.eviction
    """Who leaves a memory tier first."""
    admission: str = DEFAULT.admission
    """What may enter a tier. It is asked where no slower tier takes what leaves, and before a spill."""
    prefetch: str = DEFAULT.prefetch
    """Who comes up before anyone asks: who announced it, also who is likely to (turns), or nobody (empty)."""
    tiers: dict[str, TierPolicy] = {}
    """Exceptions by tier: hbm, dram, nvme."""
    options: dict[str, dict[str, Any]] = {}
    """Options by policy name."""
    allowed_modules: list[str] = []
    """Python modules whose classes may be named as policies, submodules included."""

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
        """Return the administrator's own policies."""
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
        """Build the policies as a daemon would, and forget them; return why they cannot be, empty when they
        can. Runs the code of modules that are allowed."""
        facts, options = PolicyFacts(Catalog(), b""), PlannerOptions()
        costs = CostModel(options.default_bandwidth_bytes_per_s, options.default_latency_s)
        try:
            build(self.choice(), facts, costs, dict.fromkeys((Tier.HBM, Tier.DRAM, Tier.NVME), 1 << 30))
        except ValueError as problem:
            return str(problem)
        return ""

    def choice(self) -> PolicyChoice:
        """Return what the planner builds its policies from."""
        tiers = {Tier[label.upper()]: of_tier for label, of_tier in self.tiers.items()}
        return PolicyChoice(
            eviction=self.eviction,
            admission=self.admission,
            prefetch=self.prefetch,
            eviction_of={tier: of.eviction for tier, of in tiers.items() if of.eviction},
            admission_of={tier: of.admission for tier, of in tiers.items() if of.admission},
            options=self.options,
            allowed_modules=tuple(self.allowed_modules),
        )
