"""The `compression:` section of the settings: in which form fragments enter the cold store.

compression:
  codec: auto
  rules:
    - {layers: "0-3", codec: identity}
    - {dtype: float32, codec: planes}
  profiles: /etc/kvtier/profiles

Namespaces that name one of the profiles are stored as it says, which may lose something within bounds that
it states; nobody else's bytes ever change.
"""

import re
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ...tiers.block import DTYPE_BYTES, NamespaceIdentity
from .fields import Directory, Section, refuse

Edge: TypeAlias = Literal["nvme", "remote"]
CodecName: TypeAlias = Literal["auto", "identity", "exponents", "planes", "lz4", "zstd"]
_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


class CompressionRule(Section):
    """One exception. What it does not name, it does not ask for."""

    edge: Edge = "nvme"
    """Where to: `nvme`, the cold store, or `remote`, streams to and from clients without shared memory."""
    model: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    """Beginning of the model's digest, in hex."""
    dtype: str = ""
    """Type of the cached values."""
    layers: str = ""
    """First and last layer, counted from 0: `0-3`, or one. A layer group counts when all of it is inside."""
    codec: CodecName
    """What to do with them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype and self.dtype not in DTYPE_BYTES:
            refuse("dtype", f"no dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if self.layers:
            found = _LAYERS.fullmatch(self.layers)
            if found is None or int(found[1]) > int(found[2] or found[1]):
                refuse("layers", f"{self.layers!r} is no range of layers; write 0-3, or 7")
        return self

    def matches(self, identity: NamespaceIdentity, group: int, edge: Edge) -> bool:
        """Whether this rule speaks of the fragments of layer group `group` of a namespace on this edge."""
        if self.edge != edge:
            return False
        if self.dtype not in ("", identity.geometry.dtype):
            return False
        if not identity.model_digest.hex().startswith(self.model):
            return False
        if not self.layers:
            return True
        found = _LAYERS.fullmatch(self.layers)
        assert found is not None
        layers = identity.geometry.layers_of(group)
        return int(found[1]) <= layers[0] and layers[-1] <= int(found[2] or found[1])


class CompressionSettings(Section):
    """How fragments are encoded on their way into nvme, and over a network. Codecs named here are exact; none
    changes a bit."""

    codec: CodecName = "auto"
    """What no rule speaks of. `auto` measures and takes what makes a load quickest, `identity` none."""
    remote: CodecName = "auto"
    """The same for streams to and from clients on other hosts. `auto` tries both, keeps the quicker."""
    rules: list[CompressionRule] = []
    """Exceptions; the first that matches counts."""
    profiles: Directory | None = None
    """Where profiles are, `*.yaml` as `kvtier calibrate` writes them. Where `auto` decides, a namespace that
    names one is stored as it says."""
    zstd_level: Annotated[int, Field(ge=-7, le=19)] = 1
    """How hard codec `zstd` tries when it writes; every level reads alike."""

    def codec_for(self, identity: NamespaceIdentity, group: int, edge: Edge = "nvme") -> CodecName:
        """Return the codec of the first rule that matches, or the one for everything else on this edge."""
        for rule in self.rules:
            if rule.matches(identity, group, edge):
                return rule.codec
        return self.codec if edge == "nvme" else self.remote
