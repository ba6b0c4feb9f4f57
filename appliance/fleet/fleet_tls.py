"""FleetTls: certificates with which hosts prove to each other that they are hosts.

Every host shows the certificate of `access.tls`, which `access.tls.client_ca` has signed, and which has the
name `peers.certificate_name`. Files are read again when they have changed.
"""

import os
import ssl

import grpc

from ...sources.peers.connection import ConnectionLost
from ...v1.files import read_regular_file
from ..config import Tls
from ..security.tls import MAX_FILE_BYTES


class FleetTls:
    """Makes what both ends of a connection between hosts need. Thread-safe."""

    def __init__(self, files: Tls, name: str) -> None:
        assert files.client_ca is not None
        self.name = name
        self._files = (files.certificate, files.key, files.client_ca)
        self._contexts: dict[bool, tuple[object, ssl.SSLContext]] = {}

    def channel(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Return credentials and options of a gRPC channel to a host. Raises OSError."""
        certificate, key, authority = (read_regular_file(path, MAX_FILE_BYTES) for path in self._files)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return credentials, [("grpc.ssl_target_name_override", self.name)]

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Return the context of data connections. Raises OSError, ssl.SSLError among it."""
        files = [os.stat(path) for path in self._files]
        state = [(one.st_mtime_ns, one.st_ino, one.st_size) for one in files]
        known = self._contexts.get(is_server)
        if known is not None and known[0] == state:
            return known[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        certificate, key, authority = self._files
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
        if is_server:
            context.num_tickets = 0  # nothing comes that was not asked for
        self._contexts[is_server] = (state, context)
        return context

    def check_name(self, encrypted: ssl.SSLSocket) -> None:
        """Raise ConnectionLost when the other end of an accepted connection has no certificate of a host."""
        names = (encrypted.getpeercert() or {}).get("subjectAltName", ())
        if ("DNS", self.name) not in names:
            raise ConnectionLost(f"its certificate has no name {self.name}")
