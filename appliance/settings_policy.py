"""The `policy:` section of the settings: who decides, by name, with their options.

policy:
  eviction: lru
  allowed_modules: [acme.kv]
  tiers: {hbm: {eviction: "acme.kv:OurEviction"}}
  options: {lru: {...}}
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ..policies.registry import ADMISSION, EVICTION, PREFETCH, Factory, PolicyChoice, UnknownPolicy, resolve
from ..tiers.block import Tier
from .settings_fields import refuse

DEFAULT = PolicyChoice(eviction="urgency")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class TierPolicy(_Model):
    """Policies of one tier; what is empty is as for all tiers."""

    eviction: str = ""
    """Who leaves this tier first."""
    admission: str = ""
    """What may enter this tier."""


class Policy(_Model):
    """Who decides what moves. A wrong name is refused with those there are; module:Class names one's own."""

    eviction: str = DEFAULT.eviction
    """Who leaves a memory tier first."""
    admission: str = DEFAULT.admission
    """What may enter a tier. It is asked where no slower tier takes what leaves, and before a spill."""
    prefetch: str = DEFAULT.prefetch
    """Who comes up before anyone asks; empty: nobody."""
    tiers: dict[str, TierPolicy] = {}
    """Exceptions by tier: hbm, dram, nvme."""
    options: dict[str, dict[str, Any]] = {}
    """Options by policy name."""
    allowed_modules: list[str] = []
    """Python modules whose classes may be named as policies, submodules included."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        self._check("eviction", EVICTION, self.eviction)
        self._check("admission", ADMISSION, self.admission)
        self._check("prefetch", PREFETCH, self.prefetch)
        known_tiers = [tier.label for tier in (Tier.HBM, Tier.DRAM, Tier.NVME)]
        for label, of_tier in self.tiers.items():
            if label not in known_tiers:
                refuse("tiers", f"no tier {label!r}; known: {', '.join(known_tiers)}")
            self._check("tiers", EVICTION, of_tier.eviction)
            self._check("tiers", ADMISSION, of_tier.admission)
        return self

    def _check(self, key: str, known: Mapping[str, Factory], name: str) -> None:
        try:
            if name:
                resolve(known, name, self.allowed_modules)
        except UnknownPolicy as error:
            refuse(key, str(error))

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
