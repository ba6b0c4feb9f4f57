"""Mutants of fetches and exports: what would go wrong without one of their rules.

Waiting too long for a search, and what becomes of acquires that wait for one when their client is gone, is in
tests/appliance/core/requests/test_{fetch_times,fetches}.py.
"""

from typing import Any

from kvtier.appliance.core.capacity import exports
from kvtier.appliance.core.catalog import transitions
from kvtier.appliance.core.copying import copies, source_index, source_speed
from kvtier.appliance.core.instructions import Publish
from kvtier.appliance.core.requests import fetch_job, fetches
from kvtier.tiers.base import Cause, CopyOutcome

Patch = tuple[Any, str, Any]


def exports_without_holds() -> list[Patch]:
    """What is being exported may be evicted."""
    begin, finished = exports.Exports._begin, exports.Exports.finished

    def begin_without(self: Any, last: int, waiting: Any) -> None:
        before = set(self._jobs)
        begin(self, last, waiting)
        for number in set(self._jobs) - before:
            job = self._jobs[number]
            for fragment, tier in job.held:
                self._residency.drop(fragment, tier)
            job.held = []

    return [(exports.Exports, "_begin", begin_without), (exports.Exports, "finished", finished)]


def exports_hold_for_ever() -> list[Patch]:
    """An export that failed keeps its places."""
    finished = exports.Exports.finished

    def forgetful(self: Any, event: Any) -> None:
        if not event.is_stored:
            self._jobs[event.export].held = []
        finished(self, event)

    return [(exports.Exports, "finished", forgetful)]


def exports_what_is_there_twice_in_flight() -> list[Patch]:
    """A bundle is exported out of places that are not readable yet."""
    places = exports.Exports._places

    def careless(self: Any, rows: Any, num_groups: int) -> Any:
        found = places(self, rows, num_groups)
        if found or not rows:
            return found
        catalog, tier = self._core.catalog, self._core.ladder.put_tier
        if any(catalog.num_placed[tier][row] < num_groups for row in rows):
            return found
        return [(catalog.first_fragment[row] + group, tier) for group in range(num_groups) for row in rows]

    return [(exports.Exports, "_places", careless)]


def fetched_whatever_arrived() -> list[Patch]:
    """What the source sent is believed, whatever the verification says."""
    finish = copies.Copies.finish

    def believing(self: Any, copy: int, outcomes: Any) -> None:
        if self._batches[copy].source is None and isinstance(self._batches[copy].owner, fetch_job.FetchJob):
            outcomes = [CopyOutcome(None, one.checksum or b"\7" * 16) for one in outcomes]
        finish(self, copy, outcomes)

    return [(copies.Copies, "finish", believing)]


def coming_for_ever() -> list[Patch]:
    """A block that did not arrive counts as coming."""
    ended = fetches.Fetches._ended

    def forgetful(self: Any, job: Any, *rest: Any) -> None:
        coming = dict.fromkeys(job.coming, job)
        ended(self, job, *rest)
        self._coming.update(coming)

    return [(fetches.Fetches, "_ended", forgetful)]


def asks_again_at_once() -> list[Patch]:
    """What is not there is searched for again and again while one acquire waits."""
    begin = fetches.Fetches.begin

    def insistent(self: Any, event: Any, client: Any, namespace: Any, count: int, until: Any = None) -> bool:
        return begin(self, event, client, namespace, count, None)

    return [
        (fetches.Fetches, "begin", insistent),
        (source_index.SourceIndex, "is_present", lambda self, namespace_id, name: None),
    ]


def fetch_without_its_hold() -> list[Patch]:
    """Places that a fetch writes into are free when its acquire gives up."""
    start = copies.Copies.start_fetch

    def start_and_drop(self: Any, bundle: Any, groups: Any, deadline_at: float, owner: Any) -> None:
        start(self, bundle, groups, deadline_at, owner)
        for moves in groups:
            for move in moves:
                transitions.Transitions.drop(self._core.transitions, move.fragment, self._put_tier)

    return [(copies.Copies, "start_fetch", start_and_drop)]


def fetched_into_each_others_places() -> list[Patch]:
    """Fragments of a group land in the places of others."""
    start = copies.Copies.start_fetch

    def crossed(self: Any, bundle: Any, groups: Any, deadline_at: float, owner: Any) -> None:
        turned = []
        for moves in groups:
            sources = [move.source for move in moves]
            turned.append([move._replace(source=one) for move, one in zip(moves, sources[::-1], strict=True)])
        start(self, bundle, turned, deadline_at, owner)

    return [(copies.Copies, "start_fetch", crossed)]


def late_bytes_are_believed() -> list[Patch]:
    """What had not arrived when its time was over counts as arrived."""
    finish = copies.Copies.finish

    def late(self: Any, copy: int, outcomes: Any) -> None:
        if self._batches[copy].source is None and isinstance(self._batches[copy].owner, fetch_job.FetchJob):
            outcomes = [
                CopyOutcome(None, b"\7" * 16) if one.cause is Cause.CANCELLED else one for one in outcomes
            ]
        finish(self, copy, outcomes)

    return [(copies.Copies, "finish", late)]


def exports_in_the_order_of_blocks() -> list[Patch]:
    """Fragments of a bundle are handed over block by block, and stored as if group by group."""
    places = exports.Exports._places

    def turned(self: Any, rows: Any, num_groups: int) -> Any:
        found, size = places(self, rows, num_groups), len(rows)
        order = [group * size + block for block in range(size) for group in range(num_groups)]
        return [found[index] for index in order] if found else []

    return [(exports.Exports, "_places", turned)]


def published_before_it_came() -> list[Patch]:
    """Readers see the places of a fetch when it begins."""
    start = copies.Copies.start_fetch

    def early(self: Any, bundle: Any, groups: Any, deadline_at: float, owner: Any) -> None:
        start(self, bundle, groups, deadline_at, owner)
        for moves in groups:
            labels = self._core.catalog.labels_of([move.fragment for move in moves])
            self._core.outbox.emit(Publish(self._put_tier, [move.target for move in moves], labels))

    return [(copies.Copies, "start_fetch", early)]


def failed_exports_wait_for_a_use() -> list[Patch]:
    """An export that failed is not tried again."""
    return [(exports.Exports, "_try_later", lambda self, job: None)]


def on_their_way_for_ever() -> list[Patch]:
    """Bytes that landed, or never will, count as on their way: nothing is worth fetching any more."""
    ended = source_speed.SourceSpeed.ended

    def forgetful(self: Any, begun: Any, num_bytes: int, *rest: Any) -> None:
        ended(self, begun, num_bytes, *rest)
        self.on_their_way[begun.tenant] += num_bytes

    return [(source_speed.SourceSpeed, "ended", forgetful)]


SOURCE_MUTANTS = (
    on_their_way_for_ever,
    failed_exports_wait_for_a_use,
    fetched_into_each_others_places,
    late_bytes_are_believed,
    exports_in_the_order_of_blocks,
    published_before_it_came,
    exports_without_holds,
    exports_hold_for_ever,
    exports_what_is_there_twice_in_flight,
    fetched_whatever_arrived,
    coming_for_ever,
    asks_again_at_once,
    fetch_without_its_hold,
)
