"""RankPath: `POST /api/rank`, the call Rank over HTTP. docs/web-api.md is its contract.

An answer confirms a guessed prompt. So it is for readers that named themselves by a token, or for this host
where there is none; and where there are tenants it is for none: a caller over HTTP belongs to no tenant.
"""

import base64
import binascii
import json
import math
from collections.abc import Callable
from typing import Any, Final

import grpc

from ...tiers.block import HASH_BYTES
from ...v1 import kvcache_pb2 as pb
from ...v1.types_pb2 import HostLoad
from ..errors import REASONS, ApplianceError, error
from ..fleet.rank_service import RankService
from ..security.callers import Caller
from ..security.principals import Authenticator
from ..server.cache_service import CacheService
from .http_server import HttpResponse

PATH: Final = "/api/rank"
MAX_QUEUE_S: Final = 1e9
FIELDS: Final = frozenset({"namespace", "prefix_hashes", "queues"})
STATUSES: Final = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 404,  # UNKNOWN_NAMESPACE
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INTERNAL: 500,
}


class RankPath:
    """Answers requests with a JSON body. Owned by the event loop."""

    def __init__(self, ranks: RankService, cache: CacheService, access: Authenticator) -> None:
        self._ranks = ranks
        self._cache = cache
        self._access = access
        self.is_exposed: Callable[[], bool] = lambda: False  # other hosts can ask, without a token

    async def answer(self, body: bytes) -> HttpResponse:
        """Return the ranking of the prompt in `body`, or why there is none."""
        try:
            caller = self._caller()
            return _json(told(await self._ranks.rank(caller, self._request(caller, body))))
        except ApplianceError as problem:
            status = STATUSES.get(REASONS[problem.reason].code, 400)
            return _json({"reason": problem.reason, "message": problem.message}, status)

    def _caller(self) -> Caller:
        """Return the one caller that there is without tenants. Raises AccessError."""
        if self._access.has_tenants:
            raise error("NO_TENANT", "over HTTP a caller belongs to no tenant; ask over gRPC")
        if self.is_exposed():
            raise error("NOT_AUTHENTICATED", "other hosts reach this port: name a token in `observe.readers`")
        return Caller(principal=self._access.of_plain_tcp())

    def _request(self, caller: Caller, body: bytes) -> pb.RankRequest:
        """Return the request in a body. Raises CallerError."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            raise error("BAD_REQUEST", "the body is no JSON") from None
        if not isinstance(asked, dict) or not asked.keys() <= FIELDS:
            raise error("BAD_REQUEST", f"send an object with {', '.join(sorted(FIELDS))} and nothing else")
        queues = asked.get("queues", {})
        if not isinstance(queues, dict) or not all(_is_number(value) for value in queues.values()):
            raise error("BAD_REQUEST", "queues: an object of hosts and the seconds that wait at each")
        try:
            candidates = [pb.RankCandidate(host=host, queue_s=wait_s) for host, wait_s in queues.items()]
        except ValueError:  # half a surrogate pair
            raise error("BAD_REQUEST", "queues: a host has characters that are none") from None
        digest = _bytes("namespace", asked.get("namespace"), bytes.fromhex)
        return pb.RankRequest(
            namespace_id=self._namespace_id(caller, digest),
            prefix_hashes=_bytes("prefix_hashes", asked.get("prefix_hashes"), _from_base64),
            candidates=candidates,
        )

    def _namespace_id(self, caller: Caller, digest: bytes) -> int:
        """Return the number of a namespace that the caller may use. Raises CallerError, UnknownError."""
        if len(digest) != HASH_BYTES:
            raise error("BAD_NAMESPACE", f"namespace is a digest of {HASH_BYTES} bytes, is {len(digest)}")
        known = self._cache.planner.catalog.namespaces.values()
        for namespace in known:
            if namespace.identity.digest == digest and namespace.identity.domain == caller.domain:
                return namespace.id
        raise error("UNKNOWN_NAMESPACE", "no runtime has registered this namespace here")


def told(response: pb.RankResponse) -> dict[str, Any]:
    """Return a ranking as JSON has it: names of kvcache.proto; what a host did not tell is null."""
    return {
        "num_blocks": response.num_blocks,
        "block_tokens": response.block_tokens,
        "recompute_s": response.recompute_s,
        "is_guess": response.is_guess,
        "hosts": [
            {
                field.name: _load(host.load) if field.name == "load" else getattr(host, field.name)
                for field in host.DESCRIPTOR.fields
            }
            for host in response.hosts
        ],
    }


def _load(load: HostLoad) -> dict[str, Any]:
    said = {field.name: value for field, value in load.ListFields() if math.isfinite(value)}
    return {field.name: said.get(field.name) for field in load.DESCRIPTOR.fields}


def _bytes(name: str, value: object, decode: Callable[[str], bytes]) -> bytes:
    try:
        if isinstance(value, str):
            return decode(value)
    except ValueError:
        pass
    raise error("BAD_REQUEST", f"{name}: {'hexadecimal digits' if name == 'namespace' else 'base64'} as text")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as problem:
        raise ValueError(str(problem)) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_QUEUE_S


def _json(value: object, status: int = 200) -> HttpResponse:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return HttpResponse(body, "application/json", status)
