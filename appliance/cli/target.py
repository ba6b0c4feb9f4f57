"""One call to a running daemon: where it is, how long to wait, and what a failure exits with.

A daemon that is missing or does not answer is exit code 3, with the target and the fix (v1/diagnosis.py). A
socket that this user may not open is 4, because starting another daemon would not help. A refused call is 1,
with the daemon's message, which names the fix. Refused settings are 2, from the daemon and from the command.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import click
import grpc

from ...v1 import types_pb2
from ...v1.addresses import check_address, default_target
from ...v1.admin_pb2_grpc import AdminServiceStub
from ...v1.channels import open_channel
from ...v1.diagnosis import diagnose_call
from ...v1.errors import DETAIL_KEY
from ...v1.unreachable import (
    BAD_CREDENTIALS,
    CONNECTION_LOST,
    NO_ANSWER,
    NOT_RUNNING,
    REASONS,
    SOCKET_DENIED,
)
from . import EXIT_DENIED, EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE

TIMEOUT_S = 5.0
Stub = TypeVar("Stub")

target_option = click.option(
    "--target",
    envvar="KVTIER_TARGET",
    metavar="ADDRESS",
    help="The daemon's address: unix:///path or host:port.  [default: its usual place]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with stable names.")


class Failed(click.ClickException):
    """Ends the command with a sentence on stderr."""

    exit_code = EXIT_FAILED


class RefusedByDaemon(Failed):
    """The daemon refused settings."""

    exit_code = EXIT_USAGE


class Unreachable(Failed):
    """No daemon answers at the target."""

    exit_code = EXIT_UNREACHABLE


class NotUpYet(Unreachable):
    """No daemon answers at the target, which a daemon that is starting may do later."""


class Denied(Failed):
    """This user may not open the daemon's socket."""

    exit_code = EXIT_DENIED


def resolve(target: str | None) -> str:
    """Return the address to call. Raises UsageError for one that is none."""
    try:
        return check_address(target or default_target(os.environ))
    except ValueError as error:
        raise click.UsageError(f"--target {error}") from error


def connect(address: str) -> grpc.Channel:
    """Return a channel to the daemon at `address`, with what the environment says to show."""
    try:
        return open_channel(address)
    except ValueError as error:
        raise Failed(str(error)) from error


def admin(address: str) -> AbstractContextManager[AdminServiceStub]:
    """Connect to the administration of the daemon at `address`, as `called` does."""
    return called(AdminServiceStub, address)


@contextmanager
def called(stub: Callable[[grpc.Channel], Stub], address: str) -> Iterator[Stub]:
    """Connect to a service of the daemon at `address`; gRPC errors inside become exits with a sentence."""
    with connect(address) as channel:
        try:
            yield stub(channel)
        except grpc.RpcError as error:
            raise failure(error, address) from error


def failure(error: grpc.RpcError, address: str) -> Failed:
    """Return (not raise) the exit for a failed call."""
    detail = _detail(error)
    if detail is not None:
        kind = RefusedByDaemon if detail.reason == "BAD_POLICY" else Failed
        return kind(f"{detail.reason}: {detail.message}")
    code, text = error.code(), error.details() or ""
    found = diagnose_call(code.value[0], text, address, os.environ)
    if found is None:
        return Failed(f"{code.name}: {text}")
    return unreached(found.reason, found.message) or Failed(found.message)


def unreached(reason: str, message: str) -> Failed | None:
    """Return (not raise) the exit for a daemon that was not reached; None for other reasons."""
    if reason == SOCKET_DENIED:
        return Denied(message)
    if reason in (NOT_RUNNING, NO_ANSWER, CONNECTION_LOST):
        return NotUpYet(message)
    return Unreachable(message) if reason in REASONS and reason != BAD_CREDENTIALS else None


def _detail(error: grpc.RpcError) -> types_pb2.ErrorDetail | None:
    """Return what the daemon said beside the gRPC status, if it said anything."""
    metadata: Any = error.trailing_metadata()  # typeshed's type for it cannot be iterated
    for key, value in metadata or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return types_pb2.ErrorDetail.FromString(value)
    return None
