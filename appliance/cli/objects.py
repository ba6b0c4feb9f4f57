"""`kvtier objects`: look into an object store that hosts share, without a daemon."""

import json
import time
from collections import Counter
from typing import Any, Final

import click
from rich.table import Table

from ...sources.objects.fleet_keys import erase_tenant
from ...sources.objects.inventory import Inventory, read_head, verify_object
from ...sources.objects.keys import BUNDLES, Epochs
from ...sources.objects.layout import BundleError, BundleHead
from ...sources.objects.lifecycle import rules
from ...sources.objects.probe import StoreProbe
from ...sources.objects.store import ObjectInfo, ObjectStore
from ...tiers.base import CopyError
from ..config.tenants import domain_named
from ..config.units import about_bytes, count
from .inspect import print_outline
from .objects_expire import expire
from .objects_target import endpoint_option, epoch_option, opened, store_argument
from .output import console, print_json
from .target import Failed, json_option

MAX_LISTED: Final = 10_000  # damaged bundles: names in a store may be planted


@click.group()
def objects() -> None:
    """Look into an object store that hosts share: what is there, and whether it is whole.

    STORE is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER or
    mooncake://MASTER:PORT, which lists nothing: only `check` works. The environment says credentials,
    region and endpoint, as for other clients: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
    AWS_ENDPOINT_URL.

    \b
    Example:
      kvtier objects ls s3://kv/prod
      kvtier objects verify s3://kv/prod
    """


objects.add_command(expire)


@objects.command()
@store_argument
@endpoint_option
@click.option("--keys", is_flag=True, help="List every bundle by its key.")
@epoch_option
@json_option
def ls(store: str, endpoint: str, keys: bool, epoch_days: int, as_json: bool) -> None:
    """List bundles: by epoch, tenant and namespace, with their number and bytes.

    A tenant and a namespace are shown as in the keys: hashes of what they are. A folder that is dead is read
    by no host any more, and the store's lifecycle rule deletes it.

    \b
    Example:
      kvtier objects ls s3://kv/prod
      kvtier objects ls file:///srv/kv --keys
    """
    with opened(store, endpoint) as there:
        if keys:
            _print_keys(there, as_json)
            return
        inventory = Inventory()
        inventory.add(there.objects(BUNDLES))
    epochs, now = Epochs(epoch_days), time.time()
    rows: list[dict[str, Any]] = [
        {
            "epoch": epoch,
            "is_dead": epochs.is_dead(epoch, now),
            "tenant": tenant,
            "namespace": namespace,
            "num_bundles": found.num_bundles,
            "bytes": found.num_bytes,
        }
        for (epoch, tenant, namespace), found in sorted(inventory.folders.items())
    ]
    other = inventory.other
    if as_json:
        print_json({"folders": rows, "num_other": other.num_bundles, "other_bytes": other.num_bytes})
        return
    table = Table("epoch", "", "tenant", "namespace", "bundles", "bytes", box=None, pad_edge=False)
    for row in rows:
        state = "dead" if row["is_dead"] else ""
        names = (row["tenant"][:12], row["namespace"][:12])
        table.add_row(row["epoch"], state, *names, f"{row['num_bundles']:,}", about_bytes(row["bytes"]))
    console().print(table)
    if other.num_bundles:
        console().print(f"{count(other.num_bundles, 'other object')}, {about_bytes(other.num_bytes)}")


def _print_keys(store: ObjectStore, as_json: bool) -> None:
    found = sorted((one.key, one.num_bytes) for one in store.objects(BUNDLES))
    if as_json:
        print_json({"objects": [{"key": key, "bytes": num_bytes} for key, num_bytes in found]})
        return
    for key, _ in found:
        click.echo(key)


@objects.command()
@store_argument
@endpoint_option
@click.argument("key")
@json_option
def stat(store: str, endpoint: str, key: str, as_json: bool) -> None:
    """Show the head of one bundle: its blocks, codecs, sizes, and where its layers stand.

    KEY is as `kvtier objects ls --keys` prints it.

    \b
    Example:
      kvtier objects stat file:///srv/kv "$(kvtier objects ls file:///srv/kv --keys | head -1)"
    """
    with opened(store, endpoint) as there:
        num_bytes = there.size(key)
        if num_bytes is None:
            raise Failed(
                f"{store} has no object {key}; `kvtier objects ls {store} --keys` lists those there are"
            )
        try:
            head = read_head(there, key, num_bytes)
        except BundleError as error:
            raise Failed(f"{key}: {error}") from error
        except FileNotFoundError:
            raise Failed(f"{key} was deleted meanwhile") from None
    print_outline(described(head), as_json)


def described(head: BundleHead) -> dict[str, Any]:
    """Return the head of a bundle as plain values."""
    raw, stored = head.entries["raw_length"], head.entries["stored_length"]
    codecs = Counter(int(codec) for codec in head.entries["codec"])
    return {
        "namespace": head.chain.namespace_digest.hex(),
        "parent": head.chain.parent_hash.hex(),
        "first_position": head.chain.position,
        "num_blocks": head.num_blocks,
        "num_groups": head.num_groups,
        "key": f"{head.key:08x}" if head.key else "",
        "are_names_hidden": head.chain.is_hidden,
        "profile": head.chain.profile_digest.hex(),
        "bytes": head.total_bytes,
        "raw_bytes": int(raw.sum(dtype="i8")),
        "stored_bytes": int(stored.sum(dtype="i8")),
        "fragments_by_codec": {str(codec): number for codec, number in sorted(codecs.items())},
        "groups": [
            dict(zip(("start", "end"), head.span_of_groups(group, group + 1), strict=True))
            for group in range(head.num_groups)
        ],
        "blocks": [name.hex() for name in head.chain.names],
    }


@objects.command()
@store_argument
@endpoint_option
@click.option(
    "--under", default=BUNDLES, show_default=True, metavar="PREFIX", help="Only keys in this folder."
)
@click.option("--delete-bad", is_flag=True, help="Delete what is damaged, after reading it twice.")
@json_option
def verify(store: str, endpoint: str, under: str, delete_bad: bool, as_json: bool) -> None:
    """Read every bundle and compare every byte with its hashes; list those that are damaged.

    Neither a key nor a codec is needed. Exit code 1 when anything is damaged and not deleted: a host that
    reads it computes instead. What is deleted is stored again when it is used; objects are never overwritten.
    At most 10,000 damaged ones are listed. What is deleted meanwhile is left out.

    \b
    Example:
      kvtier objects verify s3://kv/prod
      kvtier objects verify s3://kv/prod --delete-bad
      kvtier objects verify s3://kv/prod --under v1/b/20261123/
    """
    if not under.startswith(BUNDLES) or not under.endswith("/"):
        raise click.UsageError(
            f"--under {under!r} is no folder of bundles; write {BUNDLES}… with a / at its end"
        )
    damaged: dict[str, str] = {}
    num_bundles = num_bytes = num_damaged = 0
    with opened(store, endpoint) as there:
        for one in there.objects(under):
            try:
                why = _damage_of(there, one)
                if why and delete_bad and (why := _damage_of(there, one)):
                    there.delete([one.key])
            except FileNotFoundError:
                continue
            num_bundles += 1
            num_bytes += one.num_bytes
            num_damaged += bool(why)
            if why and len(damaged) < MAX_LISTED:
                damaged[one.key] = why
    if as_json:
        found = {"num_bundles": num_bundles, "bytes": num_bytes, "num_damaged": num_damaged}
        print_json({**found, "are_deleted": delete_bad, "damaged": damaged})
    else:
        for key, why in sorted(damaged.items()):
            console().print(f"{key}  {why}", markup=False, soft_wrap=True)
        state = "damaged and deleted" if delete_bad else "damaged"
        console().print(f"{count(num_bundles, 'bundle')}, {about_bytes(num_bytes)}: {num_damaged:,} {state}")
    if num_damaged and not delete_bad:
        fix = "delete them (--delete-bad), and they are stored again when used"
        raise Failed(f"{count(num_damaged, 'bundle')} damaged; {fix}")


def _damage_of(store: ObjectStore, one: ObjectInfo) -> str:
    """Return what is wrong with a bundle; empty when nothing is. Raises FileNotFoundError."""
    try:
        verify_object(store, one.key, one.num_bytes)
    except (BundleError, CopyError) as error:
        return str(error)
    return ""


@objects.command("erase-tenant")
@store_argument
@endpoint_option
@click.argument("tenant")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def erase_tenant_(store: str, endpoint: str, tenant: str, yes: bool, as_json: bool) -> None:
    """Destroy the key of TENANT in a store, then delete its bundles. There is no way back.

    TENANT is the name of a tenant, or group:NAME, public: or common: for what several share. Needs no key and
    no daemon. Daemons notice within a minute; what they keep on their own hosts `kvtier tenant erase` erases,
    on each of them. Do that first, or they store again what they have.

    \b
    Example:
      kvtier objects erase-tenant s3://kv/prod acme
      kvtier objects erase-tenant s3://kv/prod group:colours --yes
    """
    try:
        domain = domain_named(tenant)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not yes:
        click.confirm(f"Erase everything of {tenant} in {store}?", abort=True, err=True)
    with opened(store, endpoint) as there:
        num_bundles = erase_tenant(there, domain)
    if as_json:
        print_json({"num_bundles": num_bundles})
        return
    console().print(f"erased {tenant}: {count(num_bundles, 'bundle')} deleted", markup=False)


@objects.command()
@store_argument
@endpoint_option
@epoch_option
@json_option
def check(store: str, endpoint: str, epoch_days: int, as_json: bool) -> None:
    """Try what kvtier needs of a store, and print the lifecycle rules that it has to have.

    A small bundle is stored, refused a second time, listed, read in parts, copied and deleted; clocks are
    compared, and the rule that covers the bundle, as S3 tells it. Exit code 1 when something is missing.

    \b
    Example:
      kvtier objects check s3://kv/prod
      kvtier objects check s3://kv/prod --epoch-days 7
    """
    with opened(store, endpoint) as there:
        results = list(StoreProbe(there, epoch_days).results())
        wanted = rules(*there.lifecycle_place(), epoch_days)
    failed = [one for one in results if one.problem]
    if as_json:
        print_json({"results": [one._asdict() for one in results], "rules": json.loads(wanted or "null")})
    else:
        table = Table("", "", box=None, pad_edge=False, show_header=False)
        for one in results:
            table.add_row(one.name, one.problem or "ok")
        console().print(table)
        if wanted:
            click.echo(f"rules that delete dead epochs, for this store's own tool:\n{wanted}")
        elif there.evicts:
            console().print("it makes room by itself, and needs no lifecycle rules")
        else:
            console().print(
                "there are no lifecycle rules here: run `kvtier objects expire --delete` once a day"
            )
    if failed:
        raise Failed(f"{store} lacks: {', '.join(one.name for one in failed)}")
