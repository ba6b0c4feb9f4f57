"""The `peers:` section of the settings: the other hosts of a fleet, which are read before computing.

peers:
  hosts: [kvtier-hosts.inference.svc:7070]
  certificate_name: kvtier-hosts.inference.svc
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ...sources.directories.addresses import DirectoryAccess, parse_address
from ...v1.addresses import check_address, socket_path
from .fields import Bytes, Directory, Section, refuse

MAX_HOSTS = 64


def check_host(address: str) -> str:
    """Return the address of a host, host:port. Raises ValueError."""
    if socket_path(check_address(address)) is not None or address.endswith(":0"):
        raise ValueError(f"{address!r} is no other host's address; write host:port as in its `listen`")
    return address


HostAddress = Annotated[str, AfterValidator(check_host)]


class DirectorySettings(Section):
    """Service in which the hosts of a fleet find each other.
    Redis and Valkey need `pip install kvtier[redis]`."""

    url: str = ""
    """Address: etcd://HOST:PORT,HOST:PORT, redis://HOST:PORT/DATABASE, redis+sentinel://HOST:PORT/MASTER or
    redis+cluster://HOST:PORT; with TLS etcds:, rediss:, rediss+sentinel: or rediss+cluster:; USER@ before the
    hosts; #NAME at the end where several fleets share it. Set it where hosts come and go and DNS does not say
    so. Redis needs kvtier[redis]. Empty: no directory."""
    credentials: Directory | None = None
    """Folder of files, each where the directory asks for it: `password`; `ca.crt`, the authorities that sign
    its certificate; `tls.crt` and `tls.key`, a client certificate. Read for every new connection."""
    index: bool = False
    """Keeps in Redis or Valkey which host holds what, instead of a stream between every two hosts. Set it
    above 64 hosts or so; `hosts` stays empty then."""

    @property
    def access(self) -> DirectoryAccess:
        """Return what a client shows and believes."""
        return DirectoryAccess(self.credentials)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.url:
            return self
        try:
            address = parse_address(self.url)
        except ValueError as problem:
            refuse("url", str(problem))
        if address.engine == "etcd" and self.index:
            refuse("index", "a key of etcd takes 1.2 KB; an index needs Redis or Valkey")
        if address.username and self.credentials is None:
            refuse("credentials", "must be given with USER@ in `url`: a folder with a file `password`")
        return self


class PeerSettings(Section):
    """Other hosts: what they hold is fetched from their memory before it is computed again."""

    hosts: Annotated[list[HostAddress], Field(max_length=MAX_HOSTS)] = []
    """Addresses of the hosts, host:port as in their `listen`; this host may be among them. A name stands for
    all addresses that DNS has for it, looked up every 10 s. Set it to the hosts, or in Kubernetes to a
    headless service."""
    directory: DirectorySettings = DirectorySettings()
    """Service in which this host enters itself and finds others, beside `hosts`."""
    certificate_name: str = ""
    """DNS name in the certificates of all hosts, and of no client. Needed with `access.tls`: a caller with
    this name may read blocks of every tenant, and each host is asked for it."""
    data_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on which other hosts read bytes, beside that of `listen`. Set it where a firewall or a
    NetworkPolicy lists ports. 0: the kernel chooses one."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """What carries bytes between hosts. `nixl`: NIXL writes them where both hosts have it, which was never
    run over RDMA, and costs more than `tcp` without. Set it on all hosts of a fleet where the commands of
    docs/operate/nixl.md show that it pays."""
    send_limit_bytes: Bytes | None = Field(default=None, alias="send_limit")
    """Bytes a second that this host sends to others at most. Set it where they share the network with the
    runtime's own traffic. Empty: unlimited."""

    @property
    def is_on(self) -> bool:
        """Return whether there may be other hosts."""
        return bool(self.hosts or self.directory.url)

    @property
    def host_name(self) -> str | None:
        """Return the name in hosts' certificates; empty without TLS, None without other hosts."""
        return self.certificate_name if self.is_on else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.send_limit_bytes == 0:
            refuse("send_limit", "0 sends nothing; leave it out, or remove `peers`")
        if self.hosts and self.directory.index:
            refuse("hosts", "with directory.index hosts are those of the directory; leave it empty")
        if self.directory.index and not self.directory.url:
            refuse("directory.url", "must be given with directory.index: redis://HOST:PORT")
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
    if has_tenants and peers.transport == "nixl":
        refuse("peers.transport", "NIXL neither encrypts nor checks what writes; with tenants use tcp")
