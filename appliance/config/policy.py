"""The `policy:` section of the settings: policies by name, with their options.

policy:
  eviction: "acme.kv:OurEviction"
  allowed_modules: [acme.kv]
  options: {lru: {...}}
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import model_validator

from ...policies.baselines.clairvoyant import ReplayOnly
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
from ...tiers.ladder import STANDARD, Ladder
from ..core.catalog.catalog import Catalog
from ..core.catalog.policy_facts import PolicyFacts
from ..core.options import PlannerOptions
from .fields import Section, refuse

DEFAULT = PolicyChoice(eviction="urgency", prefetch="announced")


class Policy(Section):
    """Policies by name. An unknown name is refused with the known ones; `module:Class` names your own."""

    eviction: str = DEFAULT.eviction
    """Eviction policy of the memory tiers. Change it when `kvtier replay` of a recorded trace shows more hits
    with another."""
    admission: str = DEFAULT.admission
    """Admission policy: decides which blocks enter a tier, before a spill and where no slower tier exists.
    Set `urgency` when spills of blocks that are never read wear the device."""
    prefetch: str = DEFAULT.prefetch
    """Prefetch policy. `announced`: blocks of sessions that sent `back_in_s`; empty: none. Empty it when
    runtimes announce returns that do not happen."""
    options: dict[str, dict[str, Any]] = {}
    """Options by policy name, such as `{lru: {...}}`; a policy's documentation lists them. Set them when a
    replay shows more hits with others."""
    allowed_modules: list[str] = []
    """Python modules (and their submodules) from which classes may be named as policies. Set it to use your
    own."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        self._check("eviction", EVICTION, self.eviction, is_needed=True)
        self._check("admission", ADMISSION, self.admission, is_needed=True)
        self._check("prefetch", PREFETCH, self.prefetch)
        own = {name for name in (self.eviction, self.admission, self.prefetch) if ":" in name}
        known_names = sorted({*EVICTION, *ADMISSION, *PREFETCH, *own})
        for name in self.options:
            if name not in known_names:
                refuse("options", f"no policy {name!r} has options; known: {', '.join(known_names)}")
        return self

    def _check(self, key: str, known: Mapping[str, Factory], name: str, *, is_needed: bool = False) -> None:
        try:
            if name or is_needed:
                resolve(known, name, self.allowed_modules)
        except UnknownPolicy as error:
            refuse(key, str(error))

    def objection(self, ladder: Ladder = STANDARD) -> str:
        """Return why the policies cannot be built for the tiers of `ladder`, empty when they can.

        Runs the code of allowed modules.
        """
        facts, options = PolicyFacts(Catalog(ladder), b""), PlannerOptions()
        costs = CostModel(options.default_bandwidth_bytes_per_s, options.default_latency_s, ladder=ladder)
        kinds = {"eviction": EVICTION, "admission": ADMISSION, "prefetch": PREFETCH}
        choices = [self.choice()]
        for name in self.options:  # of policies that are not in use, too
            others: dict[str, Any] = {kind: name for kind, known in kinds.items() if name in known}
            if others:
                choices.append(replace(DEFAULT, options=self.options, **others))
        for choice in choices:
            try:
                build(choice, facts, costs, dict.fromkeys(ladder.tiers, 1 << 30), ladder=ladder)
            except ReplayOnly as problem:
                if choice is choices[0]:
                    return str(problem)
            except ValueError as problem:
                return str(problem)
        return ""

    def choice(self) -> PolicyChoice:
        """Return what the planner builds its policies from."""
        return PolicyChoice(
            eviction=self.eviction,
            admission=self.admission,
            prefetch=self.prefetch,
            options=self.options,
            allowed_modules=tuple(self.allowed_modules),
        )
