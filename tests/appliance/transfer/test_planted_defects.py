"""Defects planted in what reads and writes bundles, one at a time: a test of faults fails with each."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.appliance.transfer import bundles, object_edge
from kvtier.sources.objects import bundle, keys, layout, problems
from kvtier.tiers.payload import checksum, copy
from tests.sources.objects.s3_server import S3Server

from . import test_object_edge as edge
from . import test_store_faults as faults

write_bundle = bundle.write_bundle


def _believes_payloads(head: Any, group: int, block: int, stored: Any, into: Any, opener: Any) -> bytes:
    if stored is not into:
        copy(into, stored)
    raw_checksum: bytes = head.entries[head.index(group, block)]["checksum"].tobytes()
    return raw_checksum


def _believes_memory(chain: Any, num_groups: int, fragments: Sequence[Any], into: Any = None) -> Any:
    believed = [one._replace(checksum=checksum(one.stored)) for one in fragments]
    return write_bundle(chain, num_groups, believed, into)


def _reads_to_the_end(self: Any, most: int) -> memoryview:
    """Take an object that ends for one that goes on with zeros."""
    while not self._rest:
        self._check()
        self._rest = next(self._chunks, memoryview(bytes(most)))
    part: memoryview = self._rest[:most]
    self._rest = self._rest[most:]
    self._position += len(part)
    return part


class Defect(NamedTuple):
    """What is broken, and the scene that fails of it."""

    owner: Any
    name: str
    broken: Any
    scene: Callable[[S3Server, Path], None]


def fetching(case: str) -> Callable[[S3Server, Path], None]:
    return lambda server, folder: faults.test_a_fetch_from_a_store_that_misbehaves(case, 1, server)


DEFECTS = {
    "a head is not compared with what was asked for": Defect(
        layout.BundleHead, "require", lambda self, chain, geometry: None, fetching("swapped")
    ),
    "payloads are not compared with their checksums": Defect(
        bundles, "read_fragment", _believes_payloads, fetching("a bit on the way, in the payloads")
    ),
    "payloads of another object are believed": Defect(
        bundles, "read_fragment", _believes_payloads, fetching("another bundle comes while it is read")
    ),
    "what lies in memory is not compared with what was put": Defect(
        bundles,
        "write_bundle",
        _believes_memory,
        lambda server, folder: edge.test_memory_that_is_not_what_was_put_is_not_stored(folder),
    ),
    "an object that ends too soon goes on with zeros": Defect(
        bundles._Reader, "_take", _reads_to_the_end, fetching("epoch ends while it is read")
    ),
    "a read beyond the end is a failure of the store": Defect(
        problems,
        "_BY_CODE",
        problems._BY_CODE | {"InvalidRange": problems.StoreProblem.FAILED},
        fetching("empty"),
    ),
    "a full store is not read either": Defect(
        object_edge,
        "OF_EXPORTS",
        frozenset(),
        lambda server, folder: faults.test_where_nothing_can_be_stored_bundles_are_still_fetched(
            faults.FULL, server
        ),
    ),
    "only the present epoch is read": Defect(
        keys,
        "NUM_ALIVE",
        1,
        lambda server, folder: faults.test_a_clock_that_is_off_by_days(server, -1, b""),
    ),
    "a store that copies nothing takes nothing": Defect(
        bundles.BundleTransfer,
        "_copied",
        lambda self, source, target: self._store.copy(str(source), str(target)),
        lambda server, folder: (
            faults.test_a_bundle_of_an_older_epoch_is_sent_again_where_the_store_cannot_copy(server)
        ),
    ),
    "a fetch does not look at its deadline": Defect(
        object_edge.ObjectEdge,
        "_check",
        lambda self, deadline_at: None,
        lambda server, folder: edge.test_a_fetch_ends_at_its_deadline_and_writes_no_more(folder),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_seen(
    defect: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = DEFECTS[defect]
    assert planted.name in vars(planted.owner), "stale: what it breaks is gone"
    with monkeypatch.context() as patch:
        patch.setattr(planted.owner, planted.name, planted.broken)
        with pytest.raises(AssertionError):
            planted.scene(server, tmp_path)
