"""What every client of every appliance must answer about leases, in all worlds of client_worlds.py."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.clients import (
    InvalidRequest,
    Namespace,
    NotFound,
    PreconditionFailed,
    Urgency,
)

from .client_blocks import BLOCK, chain, payload
from .client_worlds import World

#: What keeps reading memory after the view it was made from has been released.
MADE_FROM_A_VIEW: dict[str, Callable[[memoryview], Any]] = {
    "numpy.frombuffer": lambda view: np.frombuffer(view, np.uint16),
    "numpy.asarray, sliced": lambda view: np.asarray(view)[10:20].reshape(5, 2),
    "a slice": lambda view: view[5:],
    "a cast": lambda view: view.cast("H"),
}


def test_lease_reads_in_place(client: Any, namespace: Namespace) -> None:
    data = payload(2)
    assert client.put(namespace, chain(2), data).complete
    with client.acquire(namespace, chain(3), session="s", urgency=Urgency.PREFILL) as lease:
        parts = {(f.block, f.group): bytes(f.view) for f in lease}
        assert lease.num_blocks == 2
        assert len(lease.tiers) == 2
        assert sorted(parts) == [(b, g) for b in range(2) for g in range(3)]
        assert b"".join(parts[key] for key in sorted(parts)) == data.tobytes()
        assert bytes(lease.view(1, 0)) == parts[1, 0]
        assert lease.view(0, 0).readonly
        assert lease.still_valid()


def test_views_die_with_the_lease(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(1), payload(1))
    with client.acquire(namespace, chain(1)) as lease:
        assert lease.wait() == 1
        view = lease.view(0, 2)
        assert len(view) == 8 << 10
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with pytest.raises(NotFound):
        lease.view(0, 2)
    assert not lease.still_valid()
    lease.release()


@pytest.mark.parametrize("made", MADE_FROM_A_VIEW)
def test_what_was_made_from_a_view_is_found_when_its_lease_ends(
    client: Any, namespace: Namespace, made: str
) -> None:
    client.put(namespace, chain(1), payload(1))
    kept: list[Any] = []
    lease = client.acquire(namespace, chain(1))

    def read(error: type[Exception] | None = None) -> None:
        with lease:
            lease.wait()
            kept.append(MADE_FROM_A_VIEW[made](lease.view(0, 1)))
            if error is not None:
                raise error

    with pytest.raises(PreconditionFailed, match=r"fragment \(0, 1\).*copy\(\)") as raised:
        read()
    assert raised.value.reason == "VIEWS_IN_USE"
    lease.release()
    with pytest.raises(NotFound):
        lease.extend(1.0)
    # Dropped inside the lease it is no mistake; an error on its way out is not covered by this one.
    with client.acquire(namespace, chain(1)) as lease:
        lease.wait()
        assert len(MADE_FROM_A_VIEW[made](lease.view(0, 1))) > 0
    lease = client.acquire(namespace, chain(1))
    with pytest.raises(ZeroDivisionError):
        read(ZeroDivisionError)


def test_a_fragment_is_copied_out(client: Any, namespace: Namespace) -> None:
    data = payload(1)
    client.put(namespace, chain(1), data)
    with client.acquire(namespace, chain(1)) as lease:
        fragments = list(lease)
        copies = [fragment.copy() for fragment in fragments]
        into = bytearray(16 << 10)
        assert fragments[0].copy(into) is into
        with pytest.raises(InvalidRequest, match="16384 bytes"):
            fragments[0].copy(bytearray(100))
        with pytest.raises(InvalidRequest, match="read-only"):
            fragments[0].copy(bytes(16 << 10))
        assert [fragment.num_bytes for fragment in fragments] == [16 << 10, 16 << 10, 8 << 10]
        block, group, view = fragments[0]
        assert (block, group, len(view)) == (0, 0, 16 << 10)
    client.put(namespace, chain(1, "more"), payload(1, seed=2))
    np.testing.assert_array_equal(np.concatenate(copies), data)
    assert bytes(into) == data[: 16 << 10].tobytes()
    for read in (lambda: fragments[0].view, fragments[0].copy, lambda: fragments[0].num_bytes):
        with pytest.raises(NotFound):
            read()


def test_lease_from_the_middle(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(3), payload(3))
    with client.acquire(namespace, chain(3), first_block=2) as lease:
        assert {f.block for f in lease} == {2}
        assert lease.num_blocks == 3


def test_lease_of_nothing(client: Any, namespace: Namespace) -> None:
    with client.acquire(namespace, chain(2)) as lease:
        assert lease.wait() == 0
        assert list(lease) == []


def test_extend_until_released(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(1), payload(1))
    lease = client.acquire(namespace, chain(1), ttl_s=60.0)
    lease.wait()
    lease.extend(10.0)
    lease.release()
    with pytest.raises(NotFound) as raised:
        lease.extend(10.0)
    assert raised.value.reason == "LEASE_EXPIRED"


def test_leased_blocks_survive_pressure(world: World, client: Any, namespace: Namespace) -> None:
    data = payload(4)
    client.put(namespace, chain(4), data)
    with client.acquire(namespace, chain(4), ttl_s=300.0) as lease:  # however long what follows takes
        assert lease.wait() == 4
        for i in range(2 * world.capacity_bytes // (8 * BLOCK)):
            client.put(namespace, chain(8, str(i)), payload(8, seed=i))
        assert b"".join(bytes(lease.view(b, g)) for b in range(4) for g in range(3)) == data.tobytes()
        assert lease.still_valid()


def test_lease_says_how_much_is_stored(client: Any, namespace: Namespace) -> None:
    client.put(namespace, chain(2), payload(2))
    with client.acquire(namespace, chain(3), load_anyway=True) as lease:
        assert lease.wait() == 2
        assert (lease.num_stored, lease.reason) == (2, "")
