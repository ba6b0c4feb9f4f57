"""Listeners: the addresses of the gRPC server, and the caller identity that each gives.

    unix:///path   peer_credential_proxy.py reads the peer's user; gRPC itself listens behind it
    host:port      TLS (tls.py) with client certificates, or without an authority for those with a token in
    every call; or plain with access.insecure

A bearer token in the metadata (`authorization: Bearer ...`) is an identity at either listener, and goes
before the listener's own; an unknown one is refused, never overlooked.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc

from ...v1.addresses import socket_path
from ..config import Tls
from ..errors import AccessError, ApplianceError, StartError, error
from ..security.principals import Authenticator, Principal
from ..security.rights import Right
from ..security.tls import Certificates, names_of
from .peer_credential_proxy import PeerCredentialProxy

_BEARER = "bearer "


class Listeners:
    """All addresses of one server. `add_to` before the server starts, `open` after it, `close` at the end."""

    def __init__(
        self, addresses: Sequence[str], access: Authenticator, tls: Tls | None, socket_mode: int
    ) -> None:
        self.addresses: list[str] = []  # filled by `add_to`
        self._wanted = list(addresses)
        self._access = access
        self._tls = tls
        self.certificates: Certificates | None = None  # made by `add_to`
        self._socket_mode = socket_mode
        self._proxies: list[PeerCredentialProxy] = []

    def add_to(self, server: "grpc.aio.Server") -> None:
        """Add every address to `server`. Raises StartError."""
        self.certificates = Certificates(self._tls) if self._tls is not None else None
        credentials = self.certificates.credentials() if self.certificates is not None else None
        for address in self._wanted:
            path = socket_path(address)
            try:
                if path is not None:
                    proxy = PeerCredentialProxy(
                        path,
                        self._socket_mode,
                        self._access.of_peer,
                        partial(self._access.is_stranger, may_have_token=True),
                    )
                    proxy.prepare()
                    server.add_insecure_port(f"unix://{proxy.inner}")
                    self._proxies.append(proxy)
                    self.addresses.append(address)
                    continue
                if credentials is not None:
                    port = server.add_secure_port(address, credentials)
                else:
                    port = server.add_insecure_port(address)
            except RuntimeError as problem:
                raise StartError(f"cannot listen at {address}; change `listen`") from problem
            self.addresses.append(f"{address.rpartition(':')[0]}:{port}")

    def open(self) -> None:
        """Accept connections at the Unix sockets. Raises StartError."""
        for proxy in self._proxies:
            proxy.start()

    @property
    def inner_address(self) -> str | None:
        """A private address of the server itself; None where it listens at no Unix socket."""
        return f"unix://{self._proxies[0].inner}" if self._proxies else None

    @property
    def counters(self) -> Counter[str]:
        """Connections to Unix sockets that were closed at once, by reason, and calls that were held."""
        return sum((proxy.counters for proxy in self._proxies), Counter())

    def set_mode(self, socket_mode: int) -> None:
        """Change the permissions of the Unix sockets."""
        for proxy in self._proxies:
            proxy.set_mode(socket_mode)

    def close(self) -> None:
        """Close the Unix sockets. Idempotent."""
        for proxy in self._proxies:
            proxy.stop()

    def principal_of(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Principal:
        """Return the principal of a call. Raises AccessError without a valid identity."""
        principal = self._at_listener(context)
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                text = str(value)
                if not text.lower().startswith(_BEARER):
                    raise error(
                        "NOT_AUTHENTICATED", "authorization is not `Bearer TOKEN`; send that, or none"
                    )
                return self._access.of_token(text[len(_BEARER) :].strip())
        if principal is None:
            raise error(
                "NOT_AUTHENTICATED",
                "this port takes bearer tokens, and none came; name a file with one in KVTIER_TOKEN_FILE",
            )
        return principal

    def revocation(
        self, context: "grpc.aio.ServicerContext[Any, Any]", right: Right, before: Principal
    ) -> ApplianceError | None:
        """Return why a caller may not go on with a call that it began as `before`; None while it may."""
        try:
            right.require(principal := self.principal_of(context))
        except AccessError as problem:
            return problem
        if _domain(principal) == _domain(before):
            return None
        return error("NO_TENANT", f"{principal.name} is of another tenant now; call again")

    def charge(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Count a call that no admission bounds. Over TCP none is."""
        for proxy in self._proxies:
            proxy.charge(context.peer())

    def peer_of(self, context: "grpc.aio.ServicerContext[Any, Any]") -> str:
        """Return the user or the host at the other end of a connection, whatever it proved."""
        peer = context.peer()
        for proxy in self._proxies:
            if (principal := proxy.principal_of(peer)) is not None:
                return principal.name
        return peer.rpartition(":")[0]

    def _at_listener(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Principal | None:
        """Return the principal that the listener gives; None where a token is needed. Raises AccessError."""
        peer = context.peer()
        if peer.startswith("unix"):
            for proxy in self._proxies:
                if (principal := proxy.principal_of(peer)) is not None:
                    return principal
            raise error("NOT_AUTHENTICATED", "this socket is the daemon's own; leave the suffix away")
        names = names_of(context.auth_context())
        if names is None:
            return self._access.of_plain_tcp()
        has_authority = self._tls is not None and self._tls.client_ca is not None
        return self._access.of_certificate(names) if has_authority else None


def _domain(principal: Principal) -> str | None:
    return principal.tenancy.domain if principal.tenancy is not None else None
