"""`kvtier evict`: make room in a tier now."""

import click

from ...v1 import admin_pb2, types_pb2
from ..units import about_bytes, parse_bytes
from .output import console, plain, print_json
from .target import admin, json_option, resolve, target_option

TIMEOUT_S = 60.0  # evicting may have to wait for copies


@click.command()
@click.argument("tier", type=click.Choice(["hbm", "dram", "nvme"]))
@click.argument("size", metavar="SIZE|all")
@target_option
@json_option
def evict(tier: str, size: str, target: str | None, as_json: bool) -> None:
    """Drop unpinned blocks of TIER, coldest first, until SIZE bytes are free.

    \b
    Example:
      kvtier evict dram 4GiB
      kvtier evict nvme all
    """
    try:
        num_bytes = 0 if size == "all" else parse_bytes(int(size) if size.isdigit() else size)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if num_bytes == 0 and size != "all":
        raise click.UsageError("nothing to evict; write a size such as 4GiB, or all")
    request = admin_pb2.EvictRequest(tier=types_pb2.Tier.Value(f"TIER_{tier.upper()}"), bytes=num_bytes)
    with admin(resolve(target)) as stub:
        answer = stub.Evict(request, timeout=TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
    else:
        console().print(f"evicted {answer.num_blocks:,} blocks, {about_bytes(answer.bytes)}, from {tier}")
