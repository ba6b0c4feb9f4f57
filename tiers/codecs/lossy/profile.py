"""A profile: what each layer's keys and values may lose, head by head. Calibrated once, named by its digest.

    profile = model + geometry + rules (layer, plane, heads -> coder) + tables + what calibration measured

A namespace that names a profile agrees to it; nothing else is ever lossy. The digest covers everything a
decoder needs, so a record that carries it can be read with the profile and not without it, and a profile is
never edited: changed, it is another one.

Rules cover every head of every layer exactly once, spelled out: defaults with exceptions are shorter to
write and longer to read, and two spellings of one thing would have two digests. The digest is of the
content in a canonical form (JSON, sorted keys), not of a file: comments and line breaks do not count.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Final, Literal, TypeAlias, get_args

from ...block import NamespaceIdentity
from ..base import KNOWN_LAYOUT

Coder: TypeAlias = Literal["exact", "int", "transform"]
Axis: TypeAlias = Literal["channel", "token"]
Scalar: TypeAlias = str | int | float | bool
CODERS: Final[tuple[Coder, ...]] = get_args(Coder)
AXES: Final[tuple[Axis, ...]] = get_args(Axis)
PLANES: Final = ("k", "v")
DTYPES: Final = ("bfloat16", "float16")  # of which lossy coders know the values
VERSION: Final = 1


class ProfileError(Exception):
    """A profile that makes no sense, was damaged, or is of another model.
    The message says which and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """How some heads of one layer's K or V are written. Raises ProfileError when fields contradict.

    `int`: `bits` a value, with a scale and an offset for each channel over `group_tokens` tokens
    (axis channel: keys, because their outliers stay in their channel) or for each token (axis token: values);
    KIVI, arXiv 2402.02750.
    `transform`: coefficients in the basis of `table`, in steps of `step`, entropy-coded; heads of one rule
    share a basis. `exact`: as it is.
    """

    layer: int
    plane: int  # of PLANES
    first_head: int
    end_head: int  # behind the last one
    coder: Coder
    bits: int = 0
    axis: Axis = "token"
    group_tokens: int = 0  # 0: all tokens of a block
    step: float = 0.0
    reserve_bits: float = 0.0  # room for a coded value of `transform`, which has a varying length
    table: int = -1  # index in the profile's tables

    def __post_init__(self) -> None:
        where = f"rule of layer {self.layer}, plane {self.plane}, heads {self.first_head}-{self.end_head - 1}"
        if self.coder not in CODERS or self.axis not in AXES:
            raise ProfileError(f"{where}: coder is one of {', '.join(CODERS)}; axis of {', '.join(AXES)}")
        if min(self.layer, self.plane, self.first_head) < 0 or self.first_head >= self.end_head:
            raise ProfileError(f"{where}: counts from 0, and heads are not empty")
        if (self.coder == "int") != (self.bits != 0) or self.bits not in (0, 2, 3, 4, 5, 6, 7, 8):
            raise ProfileError(f"{where}: coder int takes 2 to 8 bits, the others none; it has {self.bits}")
        if not 0 <= self.group_tokens <= 1 << 20:
            raise ProfileError(f"{where}: group_tokens is 0 (a whole block) or the tokens of a group")
        is_transform = self.coder == "transform"
        if is_transform != (self.table >= 0 and 0 < self.step < 1e6 and 0 < self.reserve_bits < 16):
            raise ProfileError(f"{where}: transform, and only that, takes step, reserve_bits and table")

    @property
    def num_heads(self) -> int:
        """Heads it speaks of."""
        return self.end_head - self.first_head


@dataclass(frozen=True)
class Profile:
    """Raises ProfileError, saying the fix, when the rules do not cover each head of each layer once."""

    model_digest: bytes
    num_layers: int
    num_kv_heads: int  # of one shard
    head_dim: int
    num_planes: int
    dtype: str
    rules: tuple[Rule, ...]
    tables: tuple[bytes, ...] = ()
    calibration: Mapping[str, Scalar] = field(default_factory=dict, hash=False)  # what was measured, on what

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ProfileError(f"profiles are for {' and '.join(DTYPES)}, not {self.dtype}")
        object.__setattr__(self, "rules", tuple(sorted(self.rules)))
        heads_seen: dict[tuple[int, int], int] = {}
        for rule in self.rules:
            unit = (rule.layer, rule.plane)
            if rule.layer >= self.num_layers or rule.plane >= self.num_planes:
                raise ProfileError(f"a rule for layer {rule.layer}, plane {rule.plane}, which is not there")
            if rule.first_head != heads_seen.get(unit, 0):
                raise ProfileError(
                    f"layer {rule.layer}, plane {rule.plane}: head {rule.first_head} is not "
                    f"the next after {heads_seen.get(unit, 0)}; name every head once"
                )
            if rule.table >= len(self.tables):
                raise ProfileError(f"table {rule.table} is missing; there are {len(self.tables)}")
            heads_seen[unit] = rule.end_head
        for layer in range(self.num_layers):
            for plane in range(self.num_planes):
                if heads_seen.get((layer, plane), 0) != self.num_kv_heads:
                    raise ProfileError(
                        f"layer {layer}, plane {plane}: rules cover "
                        f"{heads_seen.get((layer, plane), 0)} of {self.num_kv_heads} heads"
                    )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical form: the profile's name, 32 bytes."""
        return hashlib.sha256(self.canonical()).digest()

    def canonical(self) -> bytes:
        """Return everything the profile says, in the one form its digest is taken of."""
        content = {
            "version": VERSION,
            "model": self.model_digest.hex(),
            "geometry": self.geometry(),
            "rules": [asdict(rule) for rule in self.rules],
            "tables": [hashlib.sha256(table).hexdigest() for table in self.tables],
            "calibration": dict(self.calibration),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def geometry(self) -> dict[str, int | str]:
        """Return the shape of the KV it is for, by the names of Geometry."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_planes": self.num_planes,
            "dtype": self.dtype,
        }

    @cached_property
    def rules_by_unit(self) -> Mapping[tuple[int, int], tuple[Rule, ...]]:
        """The rules of each (layer, plane), in the order of heads."""
        units: dict[tuple[int, int], list[Rule]] = {}
        for rule in self.rules:
            units.setdefault((rule.layer, rule.plane), []).append(rule)
        return {unit: tuple(rules) for unit, rules in units.items()}

    def why_not(self, identity: NamespaceIdentity) -> str:
        """Return why this profile is not for the KV of a namespace; empty when it is."""
        if identity.model_digest != self.model_digest:
            return f"it is of model {self.model_digest.hex()[:16]}, not {identity.model_digest.hex()[:16]}"
        if identity.geometry.layout != KNOWN_LAYOUT:
            return f"the layout is {identity.geometry.layout!r}; profiles need {KNOWN_LAYOUT!r}"
        for name, value in self.geometry().items():
            if getattr(identity.geometry, name) != value:
                return f"its {name} is {value}, the namespace's is {getattr(identity.geometry, name)}"
        return ""


def uniform_rules(
    num_layers: int, num_planes: int, num_kv_heads: int, coder: Coder, bits: int = 0, group_tokens: int = 0
) -> tuple[Rule, ...]:
    """Return rules that treat all layers alike: keys per channel, values per token."""
    return tuple(
        Rule(layer, plane, 0, num_kv_heads, coder, bits, "token" if plane else "channel", group_tokens)
        for layer in range(num_layers)
        for plane in range(num_planes)
    )
