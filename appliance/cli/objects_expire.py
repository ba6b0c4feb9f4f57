"""`kvtier objects expire`: delete dead epochs of a store that has no lifecycle rules."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import click

from ...sources.objects.keys import BUNDLES, Epochs
from ...sources.objects.probe import clock_problem
from ...sources.objects.store import ObjectInfo, ObjectStore
from ..config.units import about_bytes, count
from .objects_target import endpoint_option, epoch_option, opened, store_argument
from .output import console, print_json
from .target import Failed, json_option

BATCH: Final = 1000  # keys that are deleted in one request


@click.command()
@store_argument
@endpoint_option
@click.option(
    "--dry-run/--delete",
    "is_dry_run",
    default=True,
    help="Only list what is dead, or delete it.  [default: --dry-run]",
)
@epoch_option
@json_option
def expire(store: str, endpoint: str, is_dry_run: bool, epoch_days: int, as_json: bool) -> None:
    """Delete the epochs that no host reads any more, where the store has no lifecycle rules.

    Lists them; deletes them with --delete, for ever. Run it once a day, on any host: what another one deletes
    meanwhile does not matter. Nothing is deleted where the clocks of this host and of the store differ by
    more than an hour. --epoch-days has to be what the daemons use, which is 1.

    \b
    Example:
      kvtier objects expire file:///srv/kv
      kvtier objects expire file:///srv/kv --delete
    """
    found: list[dict[str, Any]] = []
    with opened(store, endpoint) as there:
        if not is_dry_run and (problem := clock_problem(there, time.time())):
            raise Failed(f"{store}: {problem}; nothing was deleted")
        for folder in dead_folders(there, Epochs(epoch_days), time.time()):
            num_objects = num_bytes = 0
            for batch in batches(there, folder) if not is_dry_run else [there.objects(folder)]:
                for one in batch:
                    num_objects += 1
                    num_bytes += one.num_bytes
            found.append({"folder": folder, "num_objects": num_objects, "bytes": num_bytes})
    if as_json:
        print_json({"is_deleted": not is_dry_run, "folders": found})
        return
    done = "would be deleted" if is_dry_run else "deleted"
    for row in found:
        objects_there = count(row["num_objects"], "object")
        console().print(f"{row['folder']}  {objects_there}, {about_bytes(row['bytes'])}: {done}")
    if not found:
        console().print("no epoch is dead")
    elif is_dry_run:
        console().print("`--delete` deletes them")


def batches(store: ObjectStore, folder: str) -> Iterator[list[ObjectInfo]]:
    """Delete what is in a folder, and yield it in batches; listed anew for each, as nothing else is kept.
    Ends early where a listing still shows what was deleted: the next run takes the rest."""
    before: list[ObjectInfo] = []
    while (batch := list(islice(store.objects(folder), BATCH))) and batch[:1] != before[:1]:
        store.delete([one.key for one in batch])
        yield batch
        before = batch


def dead_folders(store: ObjectStore, epochs: Epochs, now_s: float) -> Iterator[str]:
    """Yield the folders of dead epochs, oldest first, with a `/` at their end."""
    for epoch in store.folders(BUNDLES):
        if epochs.is_dead(epoch, now_s):
            yield f"{BUNDLES}{epoch}/"
