"""Stores of other clouds than Amazon's on loopback, behind TLS and a certificate of the tests' own authority.

Azurite is Microsoft's emulator of Azure's storage, out of npm: `make test-azure` installs it. For Google's
storage no emulator with the calls of obstore is packaged, so the bucket of the tests answers in its words.
"""

import base64
import hashlib
import hmac
import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.ports import free_port
from tests.security.certificates import Authority, write_server_files

from .s3_server import S3Server

AZURITE = Path(".cache/azurite/node_modules/azurite/dist/src/blob/main.js")
ACCOUNT, CONTAINER = "devstoreaccount1", "kv-cache"
SECRET = base64.b64encode(hashlib.sha256(b"of the tests").digest()).decode()
START_S = 60.0


def trusted(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the file of an authority, and those of a certificate of it: see write_server_files."""
    authority = Authority("clouds")
    (folder / "authority.pem").write_bytes(authority.certificate)
    return folder / "authority.pem", write_server_files(folder, authority, client_ca=False)


@contextmanager
def tls_server(folder: Path) -> Iterator[tuple[S3Server, dict[str, str]]]:
    """Yield the bucket of the tests behind TLS, and what tells a client to trust it."""
    authority, files = trusted(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])
    server = S3Server(context)
    try:
        yield server, {"SSL_CERT_FILE": str(authority)}
    finally:
        server.close()


def service_account(folder: Path, endpoint: str) -> tuple[Path, rsa.RSAPublicKey]:
    """Write the file that Google gives a service account; return it, and the key that proves its tokens."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "kv@example.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "gcs_base_url": endpoint,
    }
    path = folder / "account.json"
    path.write_text(json.dumps(account))
    return path, key.public_key()


def no_azurite() -> str:
    """Return why there is no Azurite here, and how to have one; empty when there is one."""
    if shutil.which("node") is None or not AZURITE.exists():
        return "no Azurite: `make test-azure` installs it, with Debian's npm"
    return ""


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what tells a client of an Azurite with one empty container."""
    authority, files = trusted(folder)
    port = free_port()
    command = ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder / "azurite")]
    command += ["--cert", files["certificate"], "--key", files["key"]]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{SECRET}"}
    endpoint = f"https://127.0.0.1:{port}/{ACCOUNT}"
    with open(folder / "azurite.log", "wb") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _make_container(endpoint, authority)
        yield {
            "SSL_CERT_FILE": str(authority),
            "AZURE_ENDPOINT": endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
        }
    finally:
        running.kill()
        running.wait()


def _make_container(endpoint: str, authority: Path) -> None:
    """Create the container as soon as Azurite answers: obstore has no call for it."""
    date, version = formatdate(usegmt=True), "2021-12-02"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
    signed += f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    mac = hmac.digest(base64.b64decode(SECRET), signed.encode(), "sha256")
    request = urllib.request.Request(f"{endpoint}/{CONTAINER}?restype=container", method="PUT")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", version)
    request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}")
    context = ssl.create_default_context(cafile=str(authority))
    ends_at = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=START_S, context=context).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.1)
