"""VirtualStore: an object store on the virtual clock, as one host sees it.

Under one host it brings what the host's own tiers had dropped: the trace of one host does not say what other
hosts would have stored for it. Hosts of a fleet share one, each over links of its own. A search takes a round
trip for each probe, a bundle one before its first byte. Bundles share a link in each direction and are stored
and read one after the other. One that was neither stored nor read for KEPT_DAYS is forgotten, as epochs are,
and the one used longest ago beyond the capacity.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from ...sources.objects.finding import gallop
from ...tiers.base import Cause, CopyOutcome
from ..core.events import CopyFinished, Event, ExportFinished, SourceSearched
from ..core.instructions import ExportBundle, FetchBundle, SearchBundles
from ..core.worth import KEPT_DAYS, SourcePrices
from .virtual import LANDED, VirtualClock

#: What a large provider lists, in dollars: used where the policy says no prices.
LIST_PRICES: Final = SourcePrices(gb_month=0.023, thousand_puts=0.005, thousand_gets=0.0004)
KEPT_S: Final = KEPT_DAYS * 86_400.0


class StoreModel(NamedTuple):
    """What a store can do."""

    capacity_bytes: float
    bandwidth_bytes_per_s: float  # in each direction
    latency_s: float  # of a request


class _Bundle:
    __slots__ = ("is_read", "num_bytes", "used_at")

    def __init__(self, num_bytes: int, used_at: float) -> None:
        self.num_bytes, self.used_at, self.is_read = num_bytes, used_at, False


class _Contents:
    """Bundles, the one used longest ago first, and their bytes."""

    def __init__(self) -> None:
        self.bundles: OrderedDict[tuple[bytes, bytes], _Bundle] = OrderedDict()
        self.num_bytes = 0


class VirtualStore:
    """Answers the planner's instructions about a source; `finished` hears of each end."""

    def __init__(self, clock: VirtualClock, model: StoreModel, finished: Callable[[Event], None]) -> None:
        self._clock, self._model, self._finished = clock, model, finished
        self._held = _Contents()
        self._free_at = {"sent_bytes": 0.0, "received_bytes": 0.0}  # of the link in each direction
        #: Requests by operation, `sent_bytes`, `received_bytes`; bundles `stored` and, of these, ever `read`.
        self.usage: Counter[str] = Counter()

    def share(self, other: "VirtualStore") -> None:
        """Hold from now on what another host's view holds, and count as one."""
        self._held, self.usage = other._held, other.usage

    def num_bundles(self, search: SearchBundles) -> int:
        """Return how many bundles of a chain are there, from the first one on."""
        digest, held = search.identity.digest, self._held.bundles
        return next(
            (n for n, name in enumerate(search.names) if (digest, name) not in held), len(search.names)
        )

    def search(self, search: SearchBundles) -> None:
        """Say later how many bundles of a chain are there."""
        probes, found = gallop(len(search.names)), None
        try:
            asked = next(probes)
            while True:
                asked = probes.send(self._find(search.identity.digest, search.names[asked]) is not None)
        except StopIteration as ended:
            found = ended.value
        self.usage["head"] += found.num_probes
        answer = SourceSearched(search.search, found.num_found, found.num_possible)
        self._after(found.num_probes * self._model.latency_s, answer)

    def fetch(self, fetch: FetchBundle) -> None:
        """Read a bundle: each batch lands when its bytes have, those beyond the deadline do not."""
        bundle = self._find(fetch.bundle.identity.digest, fetch.bundle.names[-1])
        self.usage["get"] += 2  # its head, its payloads
        landed_at = self._clock.now + self._model.latency_s
        ends_at = fetch.deadline_at - self._model.latency_s
        for copy, items in fetch.batches:
            outcome = LANDED if bundle is not None else CopyOutcome(Cause.SOURCE_GONE)
            if bundle is not None:
                num_bytes = sum(item.label.raw_length for item in items)
                carried_at = self._carry("received_bytes", num_bytes, ends_at)
                landed_at = carried_at + self._model.latency_s
                if carried_at > ends_at:
                    landed_at, outcome = fetch.deadline_at, CopyOutcome(Cause.CANCELLED)
                elif not bundle.is_read:
                    bundle.is_read = True
                    self.usage["read"] += 1
            self._after(landed_at - self._clock.now, CopyFinished(copy, [outcome] * len(items)))

    def export(self, export: ExportBundle) -> None:
        """Store a bundle, if it is not there. A trial is read then."""
        key = export.bundle.identity.digest, export.bundle.names[-1]
        if self._find(*key) is not None:
            self.usage["head"] += 1
            return self._after(self._model.latency_s, self._exported(export, 0))
        num_bytes = sum(label.raw_length for _, _, label in export.fragments)
        stored_at = self._carry("sent_bytes", num_bytes) + self._model.latency_s
        self.usage["put"] += 1
        self._clock.at(stored_at, partial(self._stored, key, num_bytes, export))
        return None

    def _stored(self, key: tuple[bytes, bytes], num_bytes: int, export: ExportBundle) -> None:
        if key not in self._held.bundles:
            self.usage["stored"] += 1
            self._held.num_bytes += num_bytes
            self._held.bundles[key] = _Bundle(num_bytes, self._clock.now)
        while self._held.num_bytes > self._model.capacity_bytes:
            self._forget()
        event = self._exported(export, num_bytes)
        self._after(event.read_s, event) if event.read_s else self._finished(event)

    def _exported(self, export: ExportBundle, sent_bytes: int) -> ExportFinished:
        """Return how an export ended; a trial is read, as if nothing else were on its way."""
        if not export.is_trial:
            return ExportFinished(export.export, True, sent_bytes)
        num_bytes = sum(label.raw_length for _, _, label in export.fragments)
        self.usage["get"] += 1
        self.usage["received_bytes"] += num_bytes
        read_s = num_bytes / self._model.bandwidth_bytes_per_s + self._model.latency_s
        return ExportFinished(export.export, True, sent_bytes, read_s)

    def _find(self, digest: bytes, name: bytes) -> _Bundle | None:
        """Return a bundle, which is used by that; None when it is not there."""
        while (
            self._held.bundles and next(iter(self._held.bundles.values())).used_at < self._clock.now - KEPT_S
        ):
            self._forget()
        bundle = self._held.bundles.get((digest, name))
        if bundle is not None:
            bundle.used_at = self._clock.now
            self._held.bundles.move_to_end((digest, name))
        return bundle

    def _forget(self) -> None:
        _, bundle = self._held.bundles.popitem(last=False)
        self._held.num_bytes -= bundle.num_bytes

    def _carry(self, direction: str, num_bytes: int, ends_at: float = float("inf")) -> float:
        """Put bytes on the link, until `ends_at`; return when the last one would have arrived."""
        begins_at = max(self._clock.now, self._free_at[direction])
        carried_at = begins_at + num_bytes / self._model.bandwidth_bytes_per_s
        self._free_at[direction] = max(begins_at, min(carried_at, ends_at))
        num_carried = (self._free_at[direction] - begins_at) * self._model.bandwidth_bytes_per_s
        self.usage[direction] += min(num_bytes, round(num_carried))
        return carried_at

    def _after(self, seconds: float, event: Event) -> None:
        self._clock.at(self._clock.now + seconds, partial(self._finished, event))
