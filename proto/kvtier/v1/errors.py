"""The errors that values and clients raise: the base of all, and the one for wrong arguments.

They stand here because the types that client and daemon share (types.py) raise InvalidRequest. The rest of
the tree is in clients/errors.py, which has these names too.
"""

from collections.abc import Mapping

#: gRPC trailing metadata: a serialized ErrorDetail.
DETAIL_KEY = "kvtier-error-bin"


class KvtierError(Exception):
    """Base of all operating errors of the client."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        retry_after_s: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})


class InvalidRequest(KvtierError, ValueError):
    """The call itself is wrong; sent again as it is, it fails again."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "BAD_REQUEST",
        retry_after_s: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s, metadata=metadata)
