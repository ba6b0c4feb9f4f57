"""State of one segment in its present life, for the engine of the cold store, and the audit of all."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .footer import FooterError, check_entries
from .manifest import Life
from .record import ENTRY

NO_FILE = -1  # descriptor of a segment without a file: it was given back


@dataclass(slots=True)
class SegmentLife:
    """State of one segment; `epoch` is 0 while it is free."""

    fd: int
    epoch: int = 0
    sealed: bool = False
    suspect: bool = False  # a flush failed: no footer, ever
    is_ending: bool = False  # the manifest is being told, or was: another life takes this one's place
    entries: bytearray = field(default_factory=bytearray)  # of the records written, until sealed
    namespaces: dict[bytes, int] = field(default_factory=dict)


def check_lives(
    segments: Sequence[SegmentLife], lives: Mapping[int, Life], data_pages: int, lock: threading.Lock
) -> list[str]:
    """Audit: lives agree with the manifest's, no two records of an unsealed segment overlap. `lock` guards
    entries, namespaces and the beginning of a life; one that ends meanwhile is not judged."""
    problems = []
    for number in range(len(segments)):
        with lock:
            segment, life = segments[number], lives.get(number)  # in this order: see `is_ending`
        if segment.epoch != (life.epoch if life else 0) and not segment.is_ending:
            problems.append(f"segment {number}: its epoch is not the manifest's")
        if segment.epoch and segment.fd == NO_FILE:
            problems.append(f"segment {number}: in use without a file")
        if life and life.sealed and not segment.sealed:
            problems.append(f"segment {number}: sealed in the manifest only")
        with lock:
            entries = np.frombuffer(bytes(segment.entries), ENTRY)
            num_namespaces = len(segment.namespaces)
        try:
            check_entries(entries[np.argsort(entries["page"])], num_namespaces, data_pages)
        except FooterError as error:
            problems.append(f"segment {number}: {error}")
    return problems
