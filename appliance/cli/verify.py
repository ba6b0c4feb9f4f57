"""`kvtier verify`: read everything that is stored and compare it with its checksums.

Asks a running daemon, tier by tier; or reads the folder of a cold store that no daemon owns.
"""

import json
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...v1 import admin_pb2
from ..config.units import about_bytes, count
from . import EXIT_FAILED
from .output import console, print_json
from .target import TIMEOUT_S, Failed, admin, json_option, resolve, target_option

#: Longest silence of a daemon that verifies: it answers once a second, and waits for copies.
PATIENCE_S = 24 * 3600.0


@click.command()
@click.argument("tier", required=False)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read the cold store in this folder, which no daemon may own, instead. Nothing in it is changed.",
)
@click.option(
    "--master-key",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --data: the file of `encryption.master_key`, to verify also the tags of what is encrypted.",
)
@target_option
@json_option
@click.pass_context
def verify(
    context: click.Context,
    tier: str | None,
    data: Path | None,
    master_key: Path | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Read everything in TIER, or in all tiers, and compare it with its checksums.

    A daemon does this in the background all the time, slowly; this is the same at full speed, and waits for
    copies that requests need. What is damaged is not served any more, and written to nvme again if memory has
    it. With --data nothing but the folder is needed: encrypted records are compared as they lie there, and
    with the master keys decrypted, too. Exits with 1 when anything was damaged.

    \b
    Example:
      kvtier verify
      kvtier verify nvme --json
      kvtier verify --data /var/lib/kvtier/cold
    """
    if data is None and master_key is not None:
        raise click.UsageError("--master-key goes with --data: a daemon has its keys")
    is_daemon_named = context.get_parameter_source("target") is ParameterSource.COMMANDLINE
    if data is not None and (tier is not None or is_daemon_named):
        raise click.UsageError("--data names a folder: leave TIER and --target out")
    report = _of_folder(data, master_key) if data is not None else _of_daemon(target, tier)
    if as_json:
        print_json(report)
    else:
        for line in _lines(report):
            console().print(line, markup=False, soft_wrap=True)
    if report["damaged"] or report["problems"]:
        context.exit(EXIT_FAILED)


def _of_daemon(target: str | None, tier: str | None) -> dict[str, Any]:
    report = _empty()
    with admin(resolve(target)) as stub:
        status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
        for name in [tier] if tier is not None else [one.tier for one in status.scrubs]:
            last = admin_pb2.VerifyResponse()
            for last in stub.Verify(admin_pb2.VerifyRequest(tier=name), timeout=PATIENCE_S):
                if not last.is_last:
                    _progress(name, last.num_units_done, last.num_units, last.bytes, last.took_s)
            if not last.is_last:
                raise Failed(f"the daemon ended before tier {name} was verified")
            one = {"name": name, "num_fragments": last.num_fragments, "bytes": last.bytes}
            report["read"].append(one | {"took_s": last.took_s})
            report["num_damaged"] += last.num_damaged
            report["num_blocks_lost"] += last.num_lost
            report["damaged"] += [f"{name}: {words}" for words in last.found]
    return report


def _of_folder(data: Path, master_key: Path | None) -> dict[str, Any]:
    from ...tiers.base import ColdStoreError  # late: only this path needs the store's parsers
    from ...tiers.cold.manifest import IncompatibleFormat
    from ...tiers.cold.verification import verify_store
    from ...tiers.encryption.master_keys import load_master_keys

    report, began_at = _empty(), time.monotonic()
    num_records = num_bytes = num_encrypted = num_segments = 0
    lost: set[tuple[str, str]] = set()
    try:
        masters = load_master_keys(master_key) if master_key is not None else None
        for one in verify_store(data, masters):
            where = "manifest" if one.segment < 0 else f"segment {one.segment}"
            harmless = [f"{where}: {words}" for words in one.problems if words.startswith("segment_unsealed")]
            report["notes"] += harmless
            report["problems"] += [
                f"{where}: {words}" for words in one.problems if f"{where}: {words}" not in harmless
            ]
            num_segments += one.segment >= 0
            num_records, num_bytes = num_records + one.num_records, num_bytes + one.num_bytes
            num_encrypted += one.num_encrypted
            report["num_damaged"] += len(one.damaged)
            for found in one.damaged:
                report["damaged"].append(json.dumps(found, sort_keys=True))
                if found["is_live"]:
                    lost.add((found["namespace"], found["prefix_hash"]))
            _progress(str(data), num_segments, num_segments, num_bytes, time.monotonic() - began_at)
    except (ColdStoreError, IncompatibleFormat, OSError) as problem:
        raise Failed(str(problem)) from problem
    took_s = time.monotonic() - began_at
    report["read"].append(
        {"name": str(data), "num_fragments": num_records, "bytes": num_bytes, "took_s": took_s}
    )
    report["num_blocks_lost"] = len(lost)
    if num_encrypted and master_key is None:
        report["notes"].append(
            f"{num_encrypted:,} records are encrypted: compared as they lie there; --master-key also "
            "verifies that they were not forged"
        )
    return report


def _empty() -> dict[str, Any]:
    return {"read": [], "num_damaged": 0, "num_blocks_lost": 0, "damaged": [], "problems": [], "notes": []}


def _progress(name: str, done: int, of: int, num_bytes: int, took_s: float) -> None:
    click.echo(f"{name}: {done} of {of}, {about_bytes(num_bytes)} in {took_s:.0f} s", err=True)


def _lines(report: dict[str, Any]) -> list[str]:
    """Return the report for people."""
    lines = []
    for one in report["read"]:
        speed = about_bytes(int(one["bytes"] / max(one["took_s"], 1e-6)))
        lines.append(
            f"{one['name']}: {count(one['num_fragments'], 'fragment')}, {about_bytes(one['bytes'])} read "
            f"in {one['took_s']:.1f} s ({speed}/s)"
        )
    lines += report["notes"]
    lines += [f"problem: {words}" for words in report["problems"]]
    lines += [f"damaged: {words}" for words in report["damaged"]]
    if not report["num_damaged"]:
        is_well = not report["damaged"] and not report["problems"]
        return [*lines, "nothing is damaged" if is_well else "no fragment is damaged"]
    lost = count(report["num_blocks_lost"], "block")
    return [*lines, f"{count(report['num_damaged'], 'fragment')} damaged, {lost} lost"]
