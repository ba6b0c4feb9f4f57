"""What the services need of parts that stand above `server`: protocols, and the values they return.

Implemented in `host` (reload) and the direct path, which import `server`; `host` wires them together.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ...v1 import direct_pb2
from ..config import Change, Loaded, Origin
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
    last_error: str = ""  # empty again after the next policy that is applied
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


class StreamedAnswers(Protocol):
    """The answers of one call that has several: iterate; raises ApplianceError where the call failed."""

    @property
    def is_last(self) -> bool:
        """Whether the answer taken just now was the last one."""
        ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


class PagesPort(Protocol):
    """The calls of the direct path; implemented by `DirectPath`. See there for what they return and raise."""

    def register_pages(self, caller: Caller, request: direct_pb2.RegisterPagesRequest) -> Any:
        """Map a runtime's pages."""
        ...

    def unregister_pages(self, caller: Caller, request: direct_pb2.UnregisterPagesRequest) -> Any:
        """Forget pages."""
        ...

    def put_pages(self, caller: Caller, request: direct_pb2.PutPagesRequest) -> Any:
        """Store blocks that lie in registered pages."""
        ...

    def cancel_pages(self, caller: Caller, request: direct_pb2.CancelPagesRequest) -> Any:
        """Stop a get into pages."""
        ...

    def get_pages(self, caller: Caller, request: direct_pb2.GetPagesRequest) -> StreamedAnswers:
        """Start a get into pages; return its answers, now and to come."""
        ...

    def client_gone(self, client_id: int) -> None:
        """End the registrations of a client that disconnected. Idempotent."""
        ...
