"""Diagnosis of a TCP address that a client could not use. See diagnosis.py, which imports this on demand."""

import socket
import ssl
from collections.abc import Mapping
from contextlib import closing

from .unreachable import (
    BAD_CREDENTIALS,
    NO_ANSWER,
    NOT_KVTIER,
    NOT_RUNNING,
    TLS_CERTIFICATE_NEEDED,
    TLS_CERTIFICATE_REFUSED,
    TLS_EXPIRED,
    TLS_NEEDED,
    TLS_NOT_SPOKEN,
    TLS_UNTRUSTED,
    TLS_WRONG_NAME,
    UNKNOWN_HOST,
    Diagnosis,
)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_EXPIRED = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_WRONG_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


class Port:
    """One TCP address under examination."""

    def __init__(self, target: str, host: str, port: int, timeout_s: float) -> None:
        self._target = target
        self._host = host
        self._address = (host, port)
        self._timeout_s = timeout_s

    def diagnose(self, environment: Mapping[str, str]) -> Diagnosis | None:
        """Return why it cannot be used with the files that `environment` names; None when it can."""
        try:
            with closing(self._connect()) as plain:
                if not environment.get("KVTIER_TLS_CA"):
                    return self._without_tls(plain)
                context = _context(environment)
                if isinstance(context, Diagnosis):
                    return context
                return self._with_tls(plain, context, environment.get("KVTIER_TLS_CERTIFICATE", ""))
        except socket.gaierror as problem:
            return Diagnosis(UNKNOWN_HOST, f"{self._host} is no host that can be found ({problem.strerror})")
        except TimeoutError:
            return Diagnosis(
                NO_ANSWER,
                f"nothing answers at {self._target} in time; is the host up, and the port open in its "
                "firewall?",
            )
        except OSError as problem:
            return Diagnosis(
                NOT_RUNNING,
                f"no daemon at {self._target} ({problem.strerror}); start one with `kvtier serve` and that "
                "address in `listen` (one that was started may need a moment: `kvtier status --wait 30s`), "
                "or name another with --target or KVTIER_TARGET",
            )

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, self._timeout_s)

    def _without_tls(self, plain: socket.socket) -> Diagnosis | None:
        first = _first_bytes(plain, _PREFACE)
        if _is_http2(first):
            return None
        if first == b"" and self._speaks_tls():
            return Diagnosis(
                TLS_NEEDED,
                f"{self._target} speaks TLS, and this side does not; set KVTIER_TLS_CA to the authority "
                "of the daemon's certificate, and KVTIER_TLS_CERTIFICATE and KVTIER_TLS_KEY, or "
                "KVTIER_TOKEN_FILE",
            )
        return self._something_else(first)

    def _with_tls(self, plain: socket.socket, context: ssl.SSLContext, certificate: str) -> Diagnosis | None:
        """`certificate`: path of the client's own; empty: none."""
        try:
            with closing(context.wrap_socket(plain, server_hostname=self._host)) as wrapped:
                if wrapped.selected_alpn_protocol() != "h2":
                    return self._something_else(b"TLS without HTTP/2")
                # The server judges the client's certificate after the client's handshake has ended.
                return None if _is_http2(_first_bytes(wrapped, b"")) else self._refused(certificate)
        except ssl.SSLCertVerificationError as problem:
            return self._unproven(problem)
        except (ssl.SSLError, ConnectionError) as problem:
            if "alert" in str(problem).lower():
                return self._refused(certificate)
        with closing(self._connect()) as again:
            first = _first_bytes(again, _PREFACE)
        if _is_http2(first):
            return Diagnosis(
                TLS_NOT_SPOKEN,
                f"{self._target} speaks no TLS, and KVTIER_TLS_CA asks for it; unset it in a network where "
                "every host may listen, or give the daemon access.tls",
            )
        return self._something_else(first)

    def _unproven(self, problem: ssl.SSLCertVerificationError) -> Diagnosis:
        """Return why the daemon's certificate does not convince."""
        said = problem.verify_message
        if problem.verify_code in _EXPIRED:
            return Diagnosis(
                TLS_EXPIRED,
                f"the certificate of {self._target} is out of date ({said}); replace "
                "access.tls.certificate, which needs no restart, and compare the clocks of both hosts",
            )
        if problem.verify_code in _WRONG_NAME:
            return Diagnosis(
                TLS_WRONG_NAME,
                f"the certificate of {self._target} is for other names ({said}); connect by a name it has, "
                f"or sign one with a subjectAltName for {self._host}",
            )
        return Diagnosis(
            TLS_UNTRUSTED,
            f"the certificate of {self._target} leads to no authority in KVTIER_TLS_CA ({said}); set that to "
            "the authority which signed the daemon's access.tls.certificate",
        )

    def _refused(self, certificate: str) -> Diagnosis:
        if not certificate:
            return Diagnosis(
                TLS_CERTIFICATE_NEEDED,
                f"{self._target} asks for a client certificate; set KVTIER_TLS_CERTIFICATE and "
                "KVTIER_TLS_KEY to one that an authority in the daemon's access.tls.client_ca signed",
            )
        return Diagnosis(
            TLS_CERTIFICATE_REFUSED,
            f"{self._target} refused the certificate {certificate}; it must be signed by an authority in "
            "the daemon's access.tls.client_ca, and not be out of date: openssl x509 -noout -issuer -dates "
            f"-in {certificate}",
        )

    def _something_else(self, first: bytes) -> Diagnosis:
        said = f"it says {first[:24]!r}" if first else "it closes the connection"
        return Diagnosis(
            NOT_KVTIER,
            f"what listens at {self._target} is no kvtier daemon's gRPC port: {said}; name an address of its "
            "`listen` (observe.http is another port)",
        )

    def _speaks_tls(self) -> bool:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # nothing is said to the peer but hello
        try:
            with closing(self._connect()) as plain, closing(context.wrap_socket(plain)):
                return True
        except OSError:
            return False


def _context(environment: Mapping[str, str]) -> ssl.SSLContext | Diagnosis:
    """Return the files that the environment names as a context for TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    variable = "KVTIER_TLS_CA"
    try:
        context.load_verify_locations(cafile=environment[variable])
        if certificate := environment.get("KVTIER_TLS_CERTIFICATE"):
            variable = "KVTIER_TLS_CERTIFICATE and KVTIER_TLS_KEY"
            context.load_cert_chain(certificate, environment.get("KVTIER_TLS_KEY") or None, password="")
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        return Diagnosis(
            BAD_CREDENTIALS,
            f"{variable}: these files cannot be used ({problem}); they must be PEM, without a password, and "
            "a key must be of its certificate",
        )
    return context


def _first_bytes(connection: socket.socket, hello: bytes) -> bytes:
    """Send `hello`; return the first bytes that come, empty for a connection that ends."""
    try:
        if hello:
            connection.sendall(hello)
        return connection.recv(64)
    except (ConnectionError, ssl.SSLError):
        return b""


def _is_http2(first: bytes) -> bool:
    """Whether bytes are the beginning of HTTP/2: a SETTINGS frame of a sane length."""
    return len(first) >= 4 and first[0] == 0 and first[3] == 4
