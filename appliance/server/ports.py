"""What the services need of parts that stand above `server`: protocols, and the values they return.

Implemented in `host` (reload) and the direct path, which import `server`; `host` wires them together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ...v1 import direct_pb2
from ..config import Change, Loaded, Origin
from ..replies import AnswerQueue
from ..security.callers import Caller
from ..security.key_rotation import KeyRotation


class AppliedPolicy(NamedTuple):
    """The changes that a policy made, or would make; the generation that is in force afterwards."""

    generation: int
    changes: list[Change]


@dataclass(slots=True)
class ReloadStatus:
    """Counts and times of policy reloads. Times are the appliance's clock's."""

    generation: int = 1
    applied_at: float = 0.0
    num_applied: int = 0
    num_refused: int = 0
    last_error: str = ""  # why the file is refused as it was read last; empty: it is not
    refused_at: float = 0.0


class ReloadPort(Protocol):
    """The policy in force, and how to replace it. Implemented by `host.reload.Reload`."""

    origin: Origin
    loaded: Loaded
    rotation: KeyRotation | None
    status: ReloadStatus

    async def apply(
        self, text: str | None = None, name: str = "", *, is_dry_run: bool = False, generation: int = 0
    ) -> AppliedPolicy:
        """Replace the policy, or with `is_dry_run` only return the changes. Raises ApplianceError."""
        ...


class PagesPort(Protocol):
    """The calls of the direct path, by the names of their methods; implemented by `DirectPath`.

    Those with one answer are found by name (`register_pages` and others).
    """

    def get_pages(self, caller: Caller, request: direct_pb2.GetPagesRequest) -> AnswerQueue[Any]:
        """Start a get into pages; return its answers, now and to come."""
        ...

    def client_gone(self, client_id: int) -> None:
        """End the registrations of a client that disconnected. Idempotent."""
        ...
