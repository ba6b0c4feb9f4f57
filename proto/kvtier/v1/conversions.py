"""Between the Python types (types.py) and the wire's numbers and messages: the only place that knows both.

Enumerations are matched by name, so that neither side's numbering matters to the other.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

from . import types_pb2
from .types import STANDARD_TIERS, Geometry, NamespaceIdentity, Tier, Urgency

DEFAULT_LAYOUT = "layer,kv,token,head,dim"
E = TypeVar("E", bound=IntEnum)


def _numbers(kind: type[E], wire: Any, prefix: str) -> dict[int, E]:
    """Return the members of `kind` by the wire's number of the same name."""
    return {wire.Value(f"{prefix}_{member.name}"): member for member in kind}


TIERS: dict[int, Tier] = {types_pb2.Tier.Value(f"TIER_{tier.label.upper()}"): tier for tier in STANDARD_TIERS}
URGENCIES = _numbers(Urgency, types_pb2.Urgency, "URGENCY")
_TIER_NUMBERS = {tier: types_pb2.Tier.ValueType(number) for number, tier in TIERS.items()}
_URGENCY_NUMBERS = {urgency: types_pb2.Urgency.ValueType(number) for number, urgency in URGENCIES.items()}
_TIER_BYTES = bytes(_TIER_NUMBERS[tier] for tier in STANDARD_TIERS).ljust(256, b"\0")


def tier_to_wire(tier: Tier) -> types_pb2.Tier.ValueType:
    """Return the wire's number of a tier."""
    return _TIER_NUMBERS[tier]


def tiers_to_wire(tiers: bytes) -> bytes:
    """Return tiers, one byte each, with the wire's numbers."""
    return tiers.translate(_TIER_BYTES)


def tiers_from_wire(packed: bytes | Sequence[int]) -> tuple[Tier, ...]:
    """Return the tiers in a packed `tiers` field. Raises KeyError for a number that is no tier."""
    return tuple(TIERS[number] for number in packed)


def urgency_to_wire(urgency: Urgency) -> types_pb2.Urgency.ValueType:
    """Return the wire's number of an urgency."""
    return _URGENCY_NUMBERS[urgency]


def identity_to_wire(identity: NamespaceIdentity) -> types_pb2.NamespaceIdentity:
    """Return the message that registers an identity."""
    geometry = identity.geometry
    return types_pb2.NamespaceIdentity(
        model_digest=identity.model_digest,
        adapter_digest=identity.adapter_digest,
        shard=identity.shard,
        domain=identity.domain,
        profile_digest=identity.profile_digest,
        geometry=types_pb2.Geometry(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=geometry.block_tokens,
            dtype=geometry.dtype,
            layout=geometry.layout,
            layers_per_group=geometry.layers_per_group,
            num_planes=geometry.num_planes,
        ),
    )


def identity_from_wire(message: types_pb2.NamespaceIdentity, domain: str) -> NamespaceIdentity:
    """Return the identity in isolation domain `domain`. Raises InvalidRequest, naming the field."""
    shape = message.geometry
    geometry = Geometry(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_tokens=shape.block_tokens,
        dtype=shape.dtype,
        layout=shape.layout or DEFAULT_LAYOUT,
        layers_per_group=shape.layers_per_group,
        num_planes=shape.num_planes or 2,
    )
    return NamespaceIdentity(
        model_digest=message.model_digest,
        geometry=geometry,
        adapter_digest=message.adapter_digest,
        shard=message.shard,
        domain=domain,
        profile_digest=message.profile_digest,
    )
