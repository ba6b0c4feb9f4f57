"""The `peers:` section of the settings: the other hosts of a fleet, which are read before computing.

peers:
  hosts: [kvtier-hosts.inference.svc:7070]
  certificate_name: kvtier-hosts.inference.svc
"""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from ...v1.addresses import check_address, socket_path
from .fields import Bytes, Section, refuse

MAX_HOSTS = 64


def check_host(address: str) -> str:
    """Return the address of a host, host:port. Raises ValueError."""
    if socket_path(check_address(address)) is not None or address.endswith(":0"):
        raise ValueError(f"{address!r} is no other host's address; write host:port as in its `listen`")
    return address


HostAddress = Annotated[str, AfterValidator(check_host)]


class PeerSettings(Section):
    """Other hosts: what they hold is fetched from their memory before it is computed again."""

    hosts: Annotated[list[HostAddress], Field(max_length=MAX_HOSTS)] = []
    """Addresses of the hosts, host:port as in their `listen`; this host may be among them. A name stands for
    all addresses that DNS has for it, looked up every 10 s. Set it to the hosts, or in Kubernetes to a
    headless service."""
    certificate_name: str = ""
    """DNS name in the certificates of all hosts, and of no client. Needed with `access.tls`: a caller with
    this name may read blocks of every tenant, and each host is asked for it."""
    data_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which other hosts read bytes, beside that of `listen`. Set it where a firewall or a
    NetworkPolicy lists ports. 0: the kernel chooses one."""
    send_limit_bytes: Bytes | None = Field(default=None, alias="send_limit")
    """Bytes a second that this host sends to others at most. Set it where they share the network with the
    runtime's own traffic. Empty: unlimited."""

    @property
    def is_on(self) -> bool:
        """Return whether there may be other hosts."""
        return bool(self.hosts)

    @property
    def host_name(self) -> str | None:
        """Return the name in hosts' certificates; empty without TLS, None without other hosts."""
        return self.certificate_name if self.is_on else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.send_limit_bytes == 0:
            refuse("send_limit", "0 sends nothing; leave it out, or remove `peers`")
        return self


def check_peers(
    peers: PeerSettings, listen: list[str], *, has_authority: bool, has_tls: bool, has_tenants: bool
) -> None:
    """Refuse contradictions between `peers` and what the daemon listens on."""
    if not peers.is_on:
        return
    if all(socket_path(address) is not None for address in listen):
        refuse("listen", "with `peers` other hosts call this one: add host:port")
    if has_tls and not has_authority:
        refuse("access", "with `peers` hosts know each other by certificates; give access.tls.client_ca")
    if has_tls and not peers.certificate_name:
        refuse("peers.certificate_name", "must be given with access.tls: a name in all hosts' certificates")
    if has_tenants and not has_tls:
        refuse("peers", "with tenants hosts have to prove that they are hosts; set access.tls")
