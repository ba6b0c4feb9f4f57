"""A program that becomes another user and tries every way in; prints what each said, as JSON.

    python -m tests.security.as_another TARGET UID

Everything is imported before: another user may not be able to read this checkout, as below /root. gRPC
imports its channels when the first one is made. UID 0 keeps its user.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from click.testing import CliRunner
from grpc import _channel

import kvtier
from kvtier.appliance.cli.app import cli
from kvtier.clients.connector.guard import Guard
from kvtier.clients.errors import KvtierError
from kvtier.clients.links import remote, remote_aio

assert all((_channel, remote, remote_aio, kvtier.Client, kvtier.AsyncClient))  # imported, every one


def said(call: Callable[[], Any]) -> list[str]:
    """Return class, reason and message of the error that `call` raises; ["answered"] when it raises none."""
    try:
        call()
    except KvtierError as problem:
        return [type(problem).__name__, problem.reason, problem.message]
    return ["answered"]


def main() -> None:
    """Try them all."""
    target, uid = sys.argv[1], int(sys.argv[2])
    CliRunner().invoke(cli, ["status", "--target", "unix:///nowhere/k.sock"])  # commands import when called
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    found: dict[str, Any] = {}
    for way, shared_memory in (("local", None), ("forced", True), ("grpc", False)):
        found[f"sync {way}"] = said(partial(_info, target, shared_memory))
        found[f"async {way}"] = said(partial(_async_info, target, shared_memory))
    command = CliRunner().invoke(cli, ["status", "--target", target])
    found["command"] = [command.exit_code, command.stderr.strip()]
    found["plug-in"] = _plugin(target)
    print(json.dumps(found))


def _info(target: str, shared_memory: bool | None) -> Any:
    with kvtier.Client(target, shared_memory=shared_memory) as client:
        return client.info


def _async_info(target: str, shared_memory: bool | None) -> Any:
    async def ask() -> Any:
        async with kvtier.AsyncClient(target, shared_memory=shared_memory) as client:
            return await client.info

    return asyncio.run(ask())


def _plugin(target: str) -> dict[str, Any]:
    """Ask three times, as a runtime's connector does; return answers, causes and warnings."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("as_another").addHandler(handler)
    guard = Guard("as_another")
    with kvtier.Client(target) as client:
        answers = [guard.ask("lookup", lambda: client.info) for _ in range(3)]
    versions = [answer and answer.version for answer in answers]
    return {"answers": versions, "causes": guard.causes, "warnings": warnings}


if __name__ == "__main__":
    main()
