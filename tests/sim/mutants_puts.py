"""Mutants of puts: places given back under the mover, answers before the bytes, reservations that leak."""

from typing import Any

from kvtier.appliance.core.requests import put_job, write_requests

Patch = tuple[Any, str, Any]


def _free_places_being_written(job: Any) -> None:
    """Give the places of a put's copies in flight back to their room."""
    for batch in job._copies._batches.values():
        if batch.owner is not job:
            continue
        room = job._core.rooms[batch.target]
        for fragment, item in zip(batch.fragments, batch.items, strict=True):
            if room.is_taken(item.target):
                room.release(item.target, job._core.catalog.length_of(fragment))


def death_frees_slots() -> list[Patch]:
    """A client that is gone takes the places along that its bytes are being copied to."""

    def client_gone(self: Any, client_id: int) -> None:
        for job in list(self._jobs.values()):
            if job.client.id == client_id:
                _free_places_being_written(job)
                if not job.is_committed:
                    job.abort()

    return [(write_requests.WriteRequests, "client_gone", client_gone)]


def timeout_frees_slots() -> list[Patch]:
    """So does a put whose time is over."""
    expire = write_requests.WriteRequests.expire

    def force(self: Any, now: float) -> None:
        for job in self._jobs.values():
            if job.request.deadline_at <= now:
                _free_places_being_written(job)
        expire(self, now)

    return [(write_requests.WriteRequests, "expire", force)]


def acknowledged_early() -> list[Patch]:
    """A put does not wait for its copies."""
    finish = put_job.PutJob._finish_if_landed

    def early(self: Any) -> None:
        copying, self._num_copying = self._num_copying, 0
        finish(self)
        self._num_copying = copying

    return [(put_job.PutJob, "_finish_if_landed", early)]


def reservation_leaks() -> list[Patch]:
    """What a put gives up for want of room keeps its places."""
    return [(put_job.PutJob, "_give_back", lambda self, block: None)]


#: Name, what is broken, how.
PLANTED = [
    ("death frees", "a client's death frees slots that are being written", death_frees_slots),
    ("timeout frees", "a timeout frees slots that are being written", timeout_frees_slots),
    ("early answer", "a put is answered before its bytes were copied", acknowledged_early),
    ("reservation leaks", "what an aborted put reserved is not given back", reservation_leaks),
]
