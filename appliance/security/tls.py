"""TLS for TCP: the daemon's certificate, the authority of its clients', and the names in a client's.

gRPC does the handshake, asks for a client certificate and verifies it; without `client_ca` it asks for none,
and the names in one that is shown all the same are worth nothing. It cannot be told the lowest version
of TLS, but says with every call which one a connection has; `names_of` refuses calls over less than 1.3.
Before each handshake gRPC asks for certificates anew, so files that were read again need no restart.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import cast

import grpc

from ...v1.files import read_regular_file
from ..config import Tls
from ..errors import StartError, error

log = logging.getLogger(__name__)

LOWEST_VERSION = b"TLSv1.3"
MAX_FILE_BYTES = 1 << 20  # of certificates


class Certificates:
    """The certificate files. Raises StartError when they cannot be read at start."""

    def __init__(self, files: Tls) -> None:
        self.files = files
        try:
            self._in_force = self._read_last = self._read()
        except OSError as problem:
            raise StartError(f"access.tls: cannot read {problem.filename}: {problem.strerror}") from problem
        for setting, part in zip(("certificate", "key", "client_ca"), self._read_last, strict=True):
            if part is not None and b"-----BEGIN" not in part:
                raise StartError(f"access.tls.{setting} holds nothing in PEM format")

    def credentials(self) -> grpc.ServerCredentials:
        """Return server credentials that follow what was read last.

        A client certificate is required where an authority for those is set.
        """
        # None, for "as before", is missing in the stubs' type.
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._changed)
        return grpc.dynamic_ssl_server_credentials(
            _configuration(*self._read_last),
            changed,
            require_client_authentication=self.files.client_ca is not None,
        )

    def read_again(self) -> None:
        """Use what the files hold now. Blocks; never raises: files that cannot be read change nothing."""
        try:
            self._read_last = self._read()
        except OSError as problem:
            log.error("access.tls: cannot read %s: %s; it stays", problem.filename, problem.strerror)

    def _changed(self) -> "grpc.ServerCertificateConfiguration | None":
        """Return new certificates, None when they are the old ones; called by gRPC before a handshake.

        gRPC keeps the last ones that worked when new ones do not fit together.
        """
        if self._read_last == self._in_force:
            return None
        self._in_force = self._read_last
        log.info("access.tls: certificates have changed")
        return _configuration(*self._in_force)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        files, read = self.files, partial(read_regular_file, max_bytes=MAX_FILE_BYTES)
        client_ca = read(files.client_ca) if files.client_ca is not None else None
        return read(files.certificate), read(files.key), client_ca


def _configuration(
    certificate: bytes, key: bytes, client_ca: bytes | None
) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)


def names_of(auth_context: Mapping[str, Iterable[bytes]]) -> list[str] | None:
    """Return the names in a verified client certificate, as dns:NAME and uri:NAME; None: no TLS at all.

    Raises AccessError below TLS 1.3. Types are kept: a mail address that reads like a host is none.
    """
    if b"ssl" not in list(auth_context.get("transport_security_type", ())):
        return None
    version = next(iter(auth_context.get("ssl_tls_version", ())), b"an unknown version of TLS")
    if version != LOWEST_VERSION:
        raise error("NOT_AUTHENTICATED", f"the connection has {version.decode()}; connect with TLS 1.3")
    found = []
    for kind in ("dns", "uri"):
        found += [
            f"{kind}:{name.decode('utf-8', 'replace')}" for name in auth_context.get(f"peer_{kind}", ())
        ]
    return found
