"""What an LMCache user may say. No lmcache here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...v1.addresses import default_target
from ..connector.plugin_options import options_from
from ..errors import InvalidRequest
from ..options import Limits, Timeout
from ..sync import Client
from ..weights import checkpoint_digest, find_checkpoint

TIMEOUT = Timeout(call_s=5.0, connect_s=0.5, grace_s=0.5)
READER_STAGING_BYTES = 1 << 20  # of a client that puts nothing


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Address of the daemon, and identity of the chunks' model."""

    target: str
    domain: str = ""
    weights: str = ""  # a folder or hub name; empty: found by the model's name, if it can be

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ChunkOptions":
        """Check what was given. Raises InvalidRequest naming what is unknown."""
        target = given.get("target") or default_target(os.environ)
        return options_from(cls, {**given, "target": target}, "kvtier's LMCache plug-in")

    def client(self, what: str, *, puts: bool) -> Client:
        """Return a client, not connected yet."""
        limits = Limits() if puts else Limits(staging_bytes=READER_STAGING_BYTES)
        return Client(self.target, name=f"lmcache {what}", domain=self.domain, timeout=TIMEOUT, limits=limits)

    def weights_digest(self, model: str) -> bytes:
        """Return a digest of the model's checkpoint; empty when nothing was named and none is found."""
        try:
            return checkpoint_digest(find_checkpoint(self.weights or model))
        except (InvalidRequest, OSError):
            if self.weights:
                raise
            return b""
