"""An authority of a test's own, and certificates it signs. Made anew in each run: nothing here can expire."""

import datetime
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
_NOW = datetime.timedelta()


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._builder(self._name, self._key, is_authority=True).sign(
            self._key, hashes.SHA256()
        )
        self.certificate = self._certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, *names: str, shift: datetime.timedelta = _NOW) -> Pair:
        """Return a certificate for names of the form dns:..., uri:..., ip:... or mail:....

        Valid for a day before and after `shift` from now."""
        kinds: dict[str, Callable[[str], x509.GeneralName]] = {
            "dns": x509.DNSName,
            "uri": x509.UniformResourceIdentifier,
            "mail": x509.RFC822Name,
            "ip": lambda text: x509.IPAddress(ipaddress.ip_address(text)),
        }
        alternatives = [kinds[kind](text) for kind, _, text in (name.partition(":") for name in names)]
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0] if names else "nameless")])
        builder = self._builder(subject, key, is_authority=False, shift=shift)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def channel(self, address: str, pair: Pair | None, token: str = "") -> grpc.Channel:
        """Return a channel that trusts this authority and shows `pair`, and `token` with every call."""
        key, certificate = (pair.key, pair.certificate) if pair is not None else (None, None)
        credentials = grpc.ssl_channel_credentials(self.certificate, key, certificate)
        if token:
            call = grpc.access_token_call_credentials(token)
            credentials = grpc.composite_channel_credentials(credentials, call)
        # A subchannel of its own, or a connection of another test might be used.
        return grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)])

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        is_authority: bool,
        shift: datetime.timedelta = _NOW,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC) + shift
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )


def write_server_files(folder: Path, authority: Authority, *, client_ca: bool = True) -> dict[str, str]:
    """Write what a daemon on 127.0.0.1 needs; return it as the section access.tls, with its authority as that
    of clients unless told otherwise."""
    pair = authority.sign("ip:127.0.0.1", "dns:localhost")
    parts = {"certificate": pair.certificate, "key": pair.key}
    if client_ca:
        parts["client_ca"] = authority.certificate
    for name, content in parts.items():
        (folder / f"{name}.pem").write_bytes(content)
    return {name: str(folder / f"{name}.pem") for name in parts}
