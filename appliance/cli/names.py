"""How blocks and sessions are named on the command line: `NAMESPACE:HASH`, e.g. `1:5f3a9c01`, and by id."""

import re

import click

from ...v1 import admin_pb2

_BLOCK = re.compile(r"([0-9]+):([0-9A-Fa-f]{8,64})")


def parse_block(text: str) -> admin_pb2.BlockName:
    """Return the block named `text`. Raises UsageError, saying how it is written."""
    match = _BLOCK.fullmatch(text)
    if match is None or len(match[2]) % 2 or not 0 < int(match[1]) < 1 << 32:
        raise click.UsageError(
            f"{text!r} is no block; write NAMESPACE:HASH, an id and 8 to 64 hex digits (an even number), "
            "such as 1:5f3a9c01"
        )
    return admin_pb2.BlockName(namespace_id=int(match[1]), prefix_hash=bytes.fromhex(match[2]))


def name_subject(
    request: admin_pb2.InspectRequest | admin_pb2.GetStoryRequest | admin_pb2.ExplainRequest,
    kind: str,
    name: str,
) -> None:
    """Set what a request is about: the block or the session called `name`. Raises UsageError."""
    if kind == "block":
        request.block.CopyFrom(parse_block(name))
    else:
        request.session_id = name
