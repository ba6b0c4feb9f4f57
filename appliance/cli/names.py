"""How a block is named on the command line: `NAMESPACE:HASH`, e.g. `1:5f3a9c01`."""

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
