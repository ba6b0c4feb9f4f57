"""The `compression:` section of the settings: codecs of fragments in nvme and in streams.

compression:
  codec: auto
  rules:
    - {layers: "0-3", codec: identity}
    - {edge: remote, codec: planes}
  profiles: /etc/kvtier/profiles

Fragments of namespaces that name one of the profiles are stored as it says, with a loss within its bounds;
all others are stored exactly.
"""

import re
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ...tiers.block import NamespaceIdentity
from ...tiers.codecs.registry import BY_NAME
from .fields import Directory, Section, refuse

Edge: TypeAlias = Literal["nvme", "remote"]
if TYPE_CHECKING:
    CodecName: TypeAlias = str
else:  # the names that are registered
    CodecName = Literal[("auto", *BY_NAME)]
_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


class CompressionRule(Section):
    """One exception to `codec`. Empty keys match everything."""

    edge: Literal["", "nvme", "remote"] = ""
    """Where the fragments go: `nvme`, or `remote` for streams to and from clients without shared memory. Name
    `remote` where that network is slow and shared."""
    model: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    """First hex digits of the model's digest. Name one where models of a host compress differently."""
    layers: str = ""
    """First and last layer from 0, such as `0-3`, or one layer. Matches layer groups that lie inside
    entirely. Name them where some layers compress differently (`kvtier calibrate` says which)."""
    codec: CodecName
    """Codec for these fragments; `kvtier status` shows how fast each decodes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers:
            found = _LAYERS.fullmatch(self.layers)
            if found is None or int(found[1]) > int(found[2] or found[1]):
                refuse("layers", f"{self.layers!r} is no range of layers; write 0-3, or 7")
        return self

    def matches(self, identity: NamespaceIdentity, group: int, edge: Edge) -> bool:
        """Return whether this rule applies to layer group `group` of a namespace on this edge."""
        if self.edge not in ("", edge):
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
    """Codecs of fragments in nvme and in streams. All named here are exact."""

    codec: CodecName = "auto"
    """Codec of fragments that no rule matches. `auto` measures: for nvme it uses the one with the shortest
    load, for streams to and from clients on other hosts the faster of encoded and plain. Set `identity`
    where the processors are needed elsewhere."""
    rules: list[CompressionRule] = []
    """Exceptions; the first that matches counts. Set for layers or models that compress differently."""
    profiles: Directory | None = None
    """Directory of profiles, `*.yaml` as `kvtier calibrate` writes them; set it to use lossy compression.
    Used where the codec is `auto`, for namespaces that name a profile."""

    def codec_for(self, identity: NamespaceIdentity, group: int, edge: Edge = "nvme") -> CodecName:
        """Return the codec of the first rule that matches, or the one for everything else."""
        for rule in self.rules:
            if rule.matches(identity, group, edge):
                return rule.codec
        return self.codec
