"""Policies: what is evicted from a tier, what is admitted to one, what is prefetched.

This package exports what a policy of an administrator's own is written with; base.py has the contracts,
registry.py the policies that come with kvtier.
"""

from ..tiers.block import Tier, Urgency
from .base import (
    AdmissionPolicy,
    BlockFacts,
    Costs,
    EvictionPolicy,
    Expected,
    Future,
    Newcomer,
    Observer,
    Prefetcher,
    SessionChange,
    Surroundings,
    Use,
    Victim,
)
from .baselines.priced import PricedEviction
from .options import BadPolicyOption, Number, read_numbers

__all__ = [
    "AdmissionPolicy",
    "BadPolicyOption",
    "BlockFacts",
    "Costs",
    "EvictionPolicy",
    "Expected",
    "Future",
    "Newcomer",
    "Number",
    "Observer",
    "Prefetcher",
    "PricedEviction",
    "SessionChange",
    "Surroundings",
    "Tier",
    "Urgency",
    "Use",
    "Victim",
    "read_numbers",
]
