"""Channels: how clients and the command line connect over gRPC, and what they show of themselves.

    KVTIER_TLS_CA            authority of the daemon's certificate, PEM; turns TLS on for host:port
    KVTIER_TLS_CERTIFICATE   this caller's certificate, PEM
    KVTIER_TLS_KEY           and its key
    KVTIER_TOKEN_FILE        a bearer token, alone in a file

One rule for both, like addresses.py, so that what works for `kvtier status` works for a client. Files,
because what stands in an environment is shown by half of all tools; read at each connect, so a new one needs
no restart. A token is never sent over a connection that others can read, and nothing goes through the
proxy that `http_proxy` names: a daemon is in the same network.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from .files import read_regular_file

Options: TypeAlias = Sequence[tuple[str, Any]]
MAX_CALLS = 32  # in progress on one connection; further ones wait in the caller's channel
MAX_FILE_BYTES = 1 << 20  # of certificates or a token
_NO_PROXY = ("grpc.enable_http_proxy", 0)


def open_channel(
    target: str, options: Options = (), environment: Mapping[str, str] = os.environ
) -> grpc.Channel:
    """Return a channel to `target`. Raises ValueError, naming the variable, for what cannot be used."""
    credentials = credentials_for(target, environment)
    options = [*options, _NO_PROXY]
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def open_aio_channel(
    target: str, options: Options = (), environment: Mapping[str, str] = os.environ
) -> grpc.aio.Channel:
    """Return a channel for asyncio to `target`. Raises ValueError like `open_channel`."""
    credentials = credentials_for(target, environment)
    options = [*options, _NO_PROXY]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def credentials_for(target: str, environment: Mapping[str, str]) -> "grpc.ChannelCredentials | None":
    """Return what to show at `target`; None: nothing."""
    token = _token(environment)
    if target.startswith("unix:"):
        if not token:
            return None
        channel = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
    elif authority := _read(environment, "KVTIER_TLS_CA"):
        certificate = _read(environment, "KVTIER_TLS_CERTIFICATE") or None
        key = _read(environment, "KVTIER_TLS_KEY") or None
        if (certificate is None) != (key is None):
            raise ValueError("KVTIER_TLS_CERTIFICATE and KVTIER_TLS_KEY belong together; set both")
        channel = grpc.ssl_channel_credentials(authority, key, certificate)
    elif token:
        raise ValueError("KVTIER_TOKEN_FILE is set, but the way there is open to readers; set KVTIER_TLS_CA")
    else:
        return None
    if not token:
        return channel
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token))


def _token(environment: Mapping[str, str]) -> str:
    """Return the token to show, empty when there is none. Raises ValueError for any other content."""
    token = _read(environment, "KVTIER_TOKEN_FILE").decode("ascii", "replace").strip()
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(
            f"{environment['KVTIER_TOKEN_FILE']}, which KVTIER_TOKEN_FILE names, does not hold one token and "
            "nothing else; `kvtier tenant token NAME --out FILE` writes such a file"
        )
    return token


def _read(environment: Mapping[str, str], variable: str) -> bytes:
    """Return what the file that a variable names holds, nothing when it names none."""
    path = environment.get(variable)
    if not path:
        return b""
    try:
        return read_regular_file(Path(path), MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"{variable}: cannot read {path}: {error.strerror}") from error
