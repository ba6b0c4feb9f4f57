"""The store that commands of `kvtier objects` look into: arguments, and how it is opened."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from ...sources.objects.opening import open_store
from ...sources.objects.problems import StoreError, StoreProblem
from ...sources.objects.store import ObjectStore, StoreLimits
from .target import Failed

#: For a person at a terminal; a cache waits less.
LIMITS = StoreLimits(connect_s=5.0, idle_s=20.0, request_s=120.0, num_retries=3, retry_s=20.0)

store_argument = click.argument("store", metavar="STORE")
endpoint_option = click.option(
    "--endpoint",
    default="",
    metavar="URL",
    help="Where an S3-compatible store answers.  [default: AWS_ENDPOINT_URL, or AWS]",
)
epoch_option = click.option(
    "--epoch-days",
    type=click.IntRange(1, 365),
    default=1,
    show_default=True,
    help="Days of an epoch: they decide which folders are read, and until when.",
)


@contextmanager
def opened(address: str, endpoint: str) -> Iterator[ObjectStore]:
    """Yield a store with a bucket that is there; problems inside become exits with a sentence."""
    try:
        store = open_store(address, endpoint=endpoint, limits=LIMITS)
        store.check_bucket()
        yield store
    except StoreError as error:
        if error.problem is StoreProblem.NO_ADDRESS:
            raise click.BadParameter(f"{address}: {error}", param_hint="STORE") from error
        raise Failed(f"{address}: {error}") from error
