"""The `compression:` section of the settings: codecs of fragments in nvme and in streams.

compression:
  codec: auto
  profiles: /etc/kvtier/profiles

Fragments of namespaces that name one of the profiles are stored as it says, with a loss within its bounds;
all others are stored exactly.
"""

from typing import TYPE_CHECKING, Literal, TypeAlias

from ...tiers.codecs.registry import BY_NAME
from .fields import Directory, Section

if TYPE_CHECKING:
    CodecName: TypeAlias = str
else:  # the names that are registered
    CodecName = Literal[("auto", *BY_NAME)]


class CompressionSettings(Section):
    """Codecs of fragments in nvme and in streams. All named here are exact."""

    codec: CodecName = "auto"
    """Codec of fragments. `auto` measures: for nvme it uses the one with the shortest
    load, for streams to and from clients on other hosts the faster of encoded and plain. Set `identity`
    where the processors are needed elsewhere."""
    profiles: Directory | None = None
    """Directory of profiles, `*.yaml` as `kvtier calibrate` writes them; set it to use lossy compression.
    Used where the codec is `auto`, for namespaces that name a profile."""
