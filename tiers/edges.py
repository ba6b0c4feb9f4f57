"""Edges: copies of a list of fragments from one tier of the host to another.

Edges differ only in which end is memory: a source that has `view` (memory, staging) is written to the
target from where it lies; one that has not (nvme) reads straight into the target's own pages. So no edge
needs a bounce buffer, and a new tier needs no new edge. An engine that offers batches gets the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, cast

from . import durable
from .base import Buffer, Cause, CopyError, CopyItem, CopyOutcome, landed
from .block import FragmentLabel

Transfer: TypeAlias = tuple[int, FragmentLabel, Buffer]  # place, label, and the bytes or where they go
TransferAll: TypeAlias = Callable[[list[Transfer]], list[CopyOutcome]]
Run: TypeAlias = Callable[[Sequence[CopyItem]], list[CopyOutcome]]
Verify: TypeAlias = Callable[..., int]  # (place, label, expected generation) -> generation


class Viewable(Protocol):
    """Memory in this process: a memory tier, or a client's staging extent.

    With `is_linear`, places are byte offsets. Where places are recycled, there is also
    `verify(place, label, generation=None) -> generation`.
    """

    def view(self, place: int, length: int, /) -> Buffer:
        """Return the bytes at `place`; raises CopyError."""
        ...


class RunWritable(Protocol):
    """A target that takes neighbouring payloads at once."""

    def run_length(self, items: Sequence[CopyItem], start: int) -> int:
        """Return how many items from `start` on are neighbours, here and in the source."""
        ...

    def write_run(self, first_place: int, labels: Sequence[FragmentLabel], payload: Buffer) -> list[bytes]:
        """Store payloads that lie back to back from `first_place` on; return their checksums.
        Raises CopyError."""
        ...

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        """Store `payload`; return its checksum. Raises CopyError."""
        ...


class ReadableSource(Protocol):
    """A source that must be read. May also have `read_batch(list[Transfer]) -> list[CopyOutcome]`."""

    def read(self, place: int, label: FragmentLabel, into: Buffer) -> None:
        """Fill `into` with the payload at `place`. Raises CopyError."""
        ...


class WritableTarget(Protocol):
    """A target that takes payloads. May also have `write_batch(list[Transfer]) -> list[CopyOutcome]`."""

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        """Store `payload`, return its checksum; raises CopyError."""
        ...


def cause_of(error: Exception) -> Cause:
    """Return the cause of an operating error; raises any other error again."""
    if isinstance(error, CopyError):
        return error.cause
    if isinstance(error, MemoryError):
        return Cause.NO_SPACE
    if isinstance(error, OSError):
        return durable.cause_of(error)
    raise error


def edge(source: Viewable | ReadableSource, target: Viewable | WritableTarget) -> Run:
    """Return the function that copies items over this edge: push what lies in memory, pull what does not."""
    if getattr(source, "is_linear", False) and hasattr(target, "write_run"):
        return partial(_push_runs, cast(Viewable, source), cast(RunWritable, target))
    if hasattr(source, "view"):
        writable = cast(WritableTarget, target)
        write = getattr(target, "write_batch", None) or _each(writable.write)
        verify = getattr(source, "verify", None)
        return partial(_push, cast(Viewable, source), verify, write)
    assert hasattr(target, "view"), "one end of a host edge must be memory"
    read = getattr(source, "read_batch", None) or _each(source.read)
    return partial(_pull, read, cast(Viewable, target))


def _each(transfer: Callable[[int, FragmentLabel, Buffer], bytes | None]) -> TransferAll:
    """Return a batch function that calls `transfer` for each place."""

    def transfer_each(transfers: list[Transfer]) -> list[CopyOutcome]:
        outcomes = []
        for place, label, buffer in transfers:
            try:
                digest = transfer(place, label, buffer)
                outcomes.append(CopyOutcome(None, digest or label.checksum))
            except Exception as error:
                outcomes.append(CopyOutcome(cause_of(error)))
        return outcomes

    return transfer_each


def _push_runs(source: Viewable, target: RunWritable, items: Sequence[CopyItem]) -> list[CopyOutcome]:
    """Write items from a source with byte offsets for places, neighbours together."""
    outcomes: list[CopyOutcome] = []
    while len(outcomes) < len(items):
        start = len(outcomes)
        count = target.run_length(items, start) if start + 1 < len(items) else 1
        first = items[start]
        try:
            payload = source.view(first.source, first.label.raw_length * count)
            if count == 1:
                digests = [target.write(first.target, first.label, payload)]
            else:
                labels = [item.label for item in items[start : start + count]]
                digests = target.write_run(first.target, labels, payload)
            outcomes += landed(digests)
        except Exception as error:
            outcomes += [CopyOutcome(cause_of(error))] * count
    return outcomes


def _push(
    source: Viewable,
    verify: Verify | None,
    write: TransferAll,
    items: Sequence[CopyItem],
) -> list[CopyOutcome]:
    """Write each item from where it lies in the source; the identity there is compared before and after."""
    outcomes = [CopyOutcome(Cause.CANCELLED)] * len(items)
    opened: list[tuple[int, int]] = []  # position in the batch, generation in the source
    transfers: list[Transfer] = []
    for position, item in enumerate(items):
        try:
            generation = verify(item.source, item.label) if verify else 0
            transfers.append((item.target, item.label, source.view(item.source, item.label.raw_length)))
            opened.append((position, generation))
        except Exception as error:
            outcomes[position] = CopyOutcome(cause_of(error))
    for (position, generation), outcome in zip(opened, write(transfers), strict=True):
        outcomes[position] = outcome
        if verify and outcome.cause is None:
            try:
                verify(items[position].source, items[position].label, generation)
            except CopyError as error:
                outcomes[position] = CopyOutcome(error.cause)
    return outcomes


def _pull(read: TransferAll, target: Viewable, items: Sequence[CopyItem]) -> list[CopyOutcome]:
    """Read each item from the source into the target's own pages."""
    outcomes = [CopyOutcome(Cause.CANCELLED)] * len(items)
    opened: list[int] = []
    transfers: list[Transfer] = []
    for position, item in enumerate(items):
        try:
            transfers.append((item.source, item.label, target.view(item.target, item.label.raw_length)))
            opened.append(position)
        except Exception as error:
            outcomes[position] = CopyOutcome(cause_of(error))
    for position, outcome in zip(opened, read(transfers), strict=True):
        known = outcome.checksum or (b"" if outcome.cause else items[position].label.checksum)
        outcomes[position] = CopyOutcome(outcome.cause, known)
    return outcomes
