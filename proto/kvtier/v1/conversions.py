"""Between the Python types (types.py) and the wire's numbers and messages: the only place that knows both.

Enumerations are matched by name, so that neither side's numbering matters to the other. A daemon numbers its
tiers and says which number is which when a client connects; both ends convert by a `WireTiers`.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from . import types_pb2
from .errors import InvalidRequest
from .types import STANDARD_LADDER, Geometry, NamespaceIdentity, Tier, TierInfo, TierKind, Urgency

DEFAULT_LAYOUT = "layer,kv,token,head,dim"
FIRST_FURTHER = 16  # number of the first tier that types.proto does not name
E = TypeVar("E", bound=IntEnum)


def _numbers(kind: type[E], wire: Any, prefix: str) -> dict[int, E]:
    """Return the members of `kind` by the wire's number of the same name."""
    return {wire.Value(f"{prefix}_{member.name}"): member for member in kind}


URGENCIES = _numbers(Urgency, types_pb2.Urgency, "URGENCY")
_KINDS = {types_pb2.TierKind.Value(f"TIER_KIND_{kind.name}"): kind for kind in TierKind}
_URGENCY_NUMBERS = {urgency: types_pb2.Urgency.ValueType(number) for number, urgency in URGENCIES.items()}


class WireTiers:
    """The tiers of one daemon and the numbers that its messages have for them.

    `ladder`: its tiers, fastest first. Those that types.proto names have that number, the others the numbers
    from FIRST_FURTHER on in their order, unless `numbers`, one for each, says otherwise.
    """

    def __init__(self, ladder: Sequence[TierInfo], numbers: Sequence[int] = ()) -> None:
        self.ladder = tuple(ladder)
        further = iter(range(FIRST_FURTHER, FIRST_FURTHER + len(ladder)))
        known = dict(types_pb2.Tier.items())
        self._numbers = tuple(numbers) or tuple(
            known.get(f"TIER_{info.tier.label.upper()}") or next(further) for info in ladder
        )
        self._tiers = {number: info.tier for number, info in zip(self._numbers, ladder, strict=True)}
        self._number_of = {tier.label: types_pb2.Tier.ValueType(n) for n, tier in self._tiers.items()}
        self._bytes = bytes(self._numbers).ljust(256, b"\0")  # by position

    @classmethod
    def announced(cls, ladder: Iterable[types_pb2.TierInfo]) -> "WireTiers":
        """Return what a daemon says of its tiers; those of every daemon where it says nothing."""
        infos = list(ladder)
        if not infos:
            return STANDARD_WIRE
        tiers = [Tier(position, info.name) for position, info in enumerate(infos)]
        kinds = [_KINDS.get(info.kind) for info in infos]
        return cls(list(map(TierInfo, tiers, kinds)), [info.tier for info in infos])

    def announcement(self) -> list[types_pb2.TierInfo]:
        """Return the messages that tell clients and tools of these tiers."""
        kinds = {kind: types_pb2.TierKind.ValueType(number) for number, kind in _KINDS.items()}
        return [
            types_pb2.TierInfo(
                tier=self._number_of[tier.label],
                name=tier.label,
                kind=types_pb2.TIER_KIND_UNSPECIFIED if kind is None else kinds[kind],
            )
            for tier, kind in self.ladder
        ]

    def number(self, tier: Tier | str) -> types_pb2.Tier.ValueType:
        """Return the number of a tier, given as such or by its name.

        Raises InvalidRequest, with the names that there are.
        """
        label = tier.label if isinstance(tier, Tier) else tier
        found = self._number_of.get(label) if isinstance(label, str) else None
        if found is None:
            names = ", ".join(self._number_of)
            raise InvalidRequest(f"tier must be one of {names}, is {tier!r}", reason="BAD_REQUEST")
        return found

    def tier(self, number: int) -> Tier | None:
        """Return the tier with this number; None where there is none."""
        return self._tiers.get(number)

    def pack(self, tiers: bytes) -> bytes:
        """Return tiers, one byte each, with the wire's numbers."""
        return tiers.translate(self._bytes)

    def unpack(self, packed: bytes) -> tuple[Tier, ...]:
        """Return the tiers in a packed `tiers` field. Raises KeyError for a number that is no tier."""
        return tuple(map(self._tiers.__getitem__, packed))


STANDARD_WIRE = WireTiers(STANDARD_LADDER)


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
