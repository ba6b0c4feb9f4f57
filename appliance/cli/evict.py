"""`kvtier evict`: make room in a tier now."""

import click

from ...v1 import admin_pb2
from ...v1.conversions import STANDARD_WIRE, WireTiers
from ...v1.errors import InvalidRequest
from ...v1.types import STANDARD_TIERS
from ..config.units import about_bytes, count
from .output import console, plain, print_json
from .quantities import SIZE
from .target import admin, json_option, resolve, target_option

TIMEOUT_S = 600.0  # a large cold store is emptied segment by segment
STANDARD_NAMES = [tier.label for tier in STANDARD_TIERS]


class TierName(click.Choice[str]):
    """The name of a tier: offers those of every daemon, and takes any, as a daemon can have others."""

    def __init__(self) -> None:
        super().__init__(STANDARD_NAMES)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as it is written."""
        return value


@click.command()
@click.argument("tier", type=TierName())
@click.argument("size", metavar="SIZE|all")
@click.option(
    "--namespace", type=click.IntRange(1), metavar="ID", help="Only blocks of this namespace; goes with all."
)
@target_option
@json_option
def evict(tier: str, size: str, namespace: int | None, target: str | None, as_json: bool) -> None:
    """Drop unpinned blocks of TIER, coldest first, until SIZE bytes were freed.

    Tiers are named as in the settings: hbm, dram, nvme, further memories.

    What is being read, pinned, of a decoding session, or needed by blocks that continue it stays, and is
    counted by reason. Of nvme whole segments are emptied, oldest first, and stay empty over a restart;
    blocks that memory also holds stay readable there, and are written to nvme again before they leave it.
    Of a namespace a restart may find again what shares a segment with others: erase a tenant to be sure.

    \b
    Example:
      kvtier evict dram 4GiB
      kvtier evict nvme all
      kvtier evict dram all --namespace 3
    """
    num_bytes = 0 if size == "all" else SIZE.convert(size, None, None)
    if num_bytes == 0 and size != "all":
        raise click.UsageError("nothing to evict; write a size such as 4GiB, or all")
    if num_bytes and namespace:
        raise click.UsageError("--namespace goes with all: the whole of it leaves the tier")
    with admin(resolve(target)) as stub:
        wire = STANDARD_WIRE
        if tier not in STANDARD_NAMES:
            wire = WireTiers.announced(stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S).ladder)
        try:
            number = wire.number(tier)
        except InvalidRequest as problem:
            raise click.UsageError(problem.message) from problem
        request = admin_pb2.EvictRequest(tier=number, bytes=num_bytes, namespace_id=namespace or 0)
        answer = stub.Evict(request, timeout=TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
    else:
        console().print(words(answer, tier), soft_wrap=True)


def words(answer: admin_pb2.EvictResponse, tier: str) -> str:
    """Return what left, what of it can still be read, and what stayed and why."""
    text = f"evicted {count(answer.num_blocks, 'block')}, {about_bytes(answer.bytes)}, from {tier}"
    if answer.num_readable:
        text += f"; {answer.num_readable:,} of them are still readable from other tiers"
    if answer.num_kept:
        reasons = sorted(answer.num_kept.items(), key=lambda pair: -pair[1])
        kept = ", ".join(f"{number:,} {reason}" for reason, number in reasons)
        text += f"\nkept {count(sum(answer.num_kept.values()), 'block')}: {kept}"
    return text
