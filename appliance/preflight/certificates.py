"""What is in the files of `access.tls`, found out as a peer would: by a handshake with them, in memory.

Python's ssl reads a certificate's dates for a peer only. So a server with these files and a client that
trusts exactly this certificate shake hands over two buffers: what does not fit or does not hold today is what
OpenSSL says about it. Nothing is sent anywhere.
"""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...v1.files import read_regular_file
from ..config import Tls
from ..security.tls import MAX_FILE_BYTES

NO_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which Python's ssl has no name for


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of `access.tls`. Times are seconds since 1970."""

    unusable: Mapping[str, str] = field(default_factory=dict)  # why, by key of access.tls
    invalid: str = ""  # why a client refuses the certificate today; OpenSSL's words
    not_after: float | None = None  # of the certificate
    is_key_public: bool = False  # users beside owner and group may read the key
    num_authorities: int = 0  # certificates in client_ca that may sign others
    authorities_not_after: float | None = None  # of the one that lasts longest
    has_client_ca: bool = True
    read_at: float = 0.0

    @property
    def ends(self) -> dict[str, float]:
        """Until when certificate and authority are valid, by key of access.tls; those that can be read."""
        ends = {"certificate": self.not_after, "client_ca": self.authorities_not_after}
        return {key: not_after for key, not_after in ends.items() if not_after is not None}


def gather_tls(tls: Tls | None) -> TlsFiles | None:
    """Return what the certificate files hold; None where the settings name none."""
    if tls is None:
        return None
    paths = {"certificate": tls.certificate, "key": tls.key, "client_ca": tls.client_ca}
    unusable = {name: why for name, path in paths.items() if path is not None and (why := _unusable(path))}
    invalid, not_after = "", None
    if not unusable.keys() & {"certificate", "key"}:
        try:
            invalid, not_after = _shake_hands(tls.certificate, tls.key)
        except ssl.SSLError as problem:
            name, why = _misfit(problem, tls.certificate)
            unusable[name] = why
    authority = tls.client_ca
    ends: list[float] = []
    if authority is not None and "client_ca" not in unusable:
        try:
            ends = _ends_of_authorities(authority)
        except ssl.SSLError as problem:
            unusable["client_ca"] = f"cannot be used ({problem.reason})"
    return TlsFiles(
        unusable,
        invalid,
        not_after,
        is_key_public="key" not in unusable and bool(tls.key.stat().st_mode & 0o007),
        num_authorities=len(ends),
        authorities_not_after=max(ends, default=None),
        has_client_ca=authority is not None,
        read_at=time.time(),
    )


def _unusable(path: Path) -> str:
    """Return why a file cannot be one of PEM, empty when it can."""
    try:
        text = read_regular_file(path, MAX_FILE_BYTES)
    except OSError as problem:
        return f"cannot read {path} on this machine: {problem.strerror}"
    return "" if b"-----BEGIN" in text else f"{path} holds nothing in PEM format"


def _shake_hands(certificate: Path, key: Path, flags: int = 0) -> tuple[str, float | None]:
    """Return (why a client refuses the certificate, until when it is valid). Raises SSLError for files that
    are not what they are said to be. `flags`: of OpenSSL's verification, beside those of a client."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key, password=lambda: b"")  # else it would ask the terminal
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | flags
    client.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks, answers = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for side in (asks, answers, asks):  # TLS 1.3: hello, answer, verdict
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as refusal:
            return refusal.verify_message, None if flags else _shake_hands(certificate, key, NO_TIME)[1]
    peer = asks.getpeercert() or {}
    return "", ssl.cert_time_to_seconds(str(peer["notAfter"]))


def _misfit(problem: ssl.SSLError, certificate: Path) -> tuple[str, str]:
    """Return (which of the two files is wrong, why)."""
    if problem.reason == "KEY_VALUES_MISMATCH":
        return "key", f"is not the key of {certificate}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except ssl.SSLError as wrong:
        return "certificate", f"cannot be used ({wrong.reason})"
    return "key", f"cannot be used ({problem.reason}); one without a password is needed"


def _ends_of_authorities(path: Path) -> list[float]:
    """Return until when each authority in a file is valid. Raises SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    return [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]
