"""The book of namespaces: what it holds over a crash, and that it never fills up."""

import mmap
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.errors import ApplianceError
from kvtier.appliance.persisted.namespace_book import (
    MAX_ENTRIES,
    MAX_IDENTITY_BYTES,
    MAX_TEXTS_BYTES,
    NAME,
    NamespaceBook,
)
from kvtier.appliance.security import request_checks
from kvtier.tiers.block import DTYPE_BYTES, Geometry, NamespaceIdentity
from kvtier.tiers.memory.keeper import Keeper
from kvtier.v1 import types_pb2

GEOMETRY = Geometry(8, 1, 64, 16, "float16")
FEW_BYTES = 4096


def identity_of(number: int) -> NamespaceIdentity:
    return NamespaceIdentity(number.to_bytes(16), GEOMETRY, domain="tenant:acme")


class Supervisor:
    """Keeps the one memfd it is given, and answers `ok`, as appliance/supervisor.py does."""

    def __init__(self) -> None:
        self._own, self.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = -1
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (received := socket.recv_fds(self._own, 512, 1))[0]:
            if received[1]:
                self.descriptor = received[1][0]
            self._own.send(b"ok")

    def keeper(self) -> Keeper:
        """Return what the next daemon gets."""
        inherited = {}
        if self.descriptor >= 0:
            mapping = mmap.mmap(self.descriptor, 0)
            inherited[NAME] = (os.dup(self.descriptor), mapping)
        return Keeper(self.channel, inherited)

    def close(self) -> None:
        self.channel.close()
        self._thread.join()
        self._own.close()
        os.close(self.descriptor)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    one = Supervisor()
    yield one
    one.close()


def reopened(supervisor: Supervisor) -> dict[int, NamespaceIdentity]:
    book = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    book.close()
    return book.identities


def inherited(supervisor: Supervisor) -> dict[int, NamespaceIdentity]:
    """Return what a daemon takes over that dies at once."""
    book = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    book.close()
    assert book.inherited.items() <= book.identities.items()
    return book.inherited


def test_namespaces_keep_their_ids_over_a_crash(supervisor: Supervisor) -> None:
    book = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    noted = {4_000_000_000: identity_of(1), 7: identity_of(2)}
    for number, identity in noted.items():
        book.note(number, identity)
    book.close()
    assert reopened(supervisor) == noted


def test_a_full_book_is_written_anew_with_the_namespaces_that_there_are(supervisor: Supervisor) -> None:
    book = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    present: dict[int, NamespaceIdentity] = {}
    book.present = lambda: present
    for number in range(1, 500):
        present[number] = identity_of(number)
        present.pop(number - 3, None)  # forgotten
        book.note(number, identity_of(number))
        assert present.items() <= book.identities.items()
    book.close()
    found = reopened(supervisor)
    assert found == book.identities
    assert present.items() <= found.items()
    assert len(found) < 20


def test_nothing_of_an_erased_tenant_is_taken_over_until_it_is_admitted(supervisor: Supervisor) -> None:
    other = NamespaceIdentity(bytes(16), GEOMETRY, domain="tenant:bolt")
    noted = {7: identity_of(1), 8: other, 9: identity_of(2)}
    book = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    for number, identity in noted.items():
        book.note(number, identity)
    book.erase("tenant:acme")
    book.note(7, noted[7])  # its clients register again
    book.close()
    for _ in range(2):  # the second time as if the daemon between had died before it read all slots
        second = NamespaceBook(supervisor.keeper(), FEW_BYTES)
        assert (second.inherited, second.identities) == ({8: other}, noted)
        second.close()
    third = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    third.slots_read()
    third.close()
    fourth = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    assert fourth.inherited == noted
    fourth.erase("tenant:acme")
    fourth.admit("tenant:acme")
    fourth.close()
    assert inherited(supervisor) == noted


def test_a_book_that_is_full_while_a_tenant_is_erased_names_nothing_of_it(supervisor: Supervisor) -> None:
    book = NamespaceBook(supervisor.keeper(), FEW_BYTES)
    others = (NamespaceIdentity(n.to_bytes(16), GEOMETRY, domain="tenant:bolt") for n in range(1000))
    present = {7: identity_of(1)}
    book.present = lambda: present
    book.note(7, present[7])
    book.erase("tenant:acme")
    for number in range(10, 100):
        book.note(number, next(others))
        assert 7 not in inherited(supervisor)
    book.close()


def largest(number: int) -> NamespaceIdentity:
    """Return one of the largest identities that a request may name, of characters of four bytes each."""
    wire = types_pb2.NamespaceIdentity(
        model_digest=number.to_bytes(64),
        adapter_digest=bytes(64),
        profile_digest=bytes(32),
        shard="\N{LOBSTER}" * ((MAX_TEXTS_BYTES - len("tenant:acme")) // 4),
        geometry=types_pb2.Geometry(
            num_layers=8, num_kv_heads=1, head_dim=64, block_tokens=16, dtype=max(DTYPE_BYTES, key=len)
        ),
    )
    return request_checks.identity(wire, "tenant:acme")


def test_identities_with_larger_texts_are_refused() -> None:
    """Before: 1,024 characters each, and a tenant's namespaces took the space of all others'."""
    wire = types_pb2.NamespaceIdentity(model_digest=bytes(32), shard="\N{LOBSTER}" * 256)
    with pytest.raises(ApplianceError, match=r"1024 bytes together, have 1035; shorten them"):
        request_checks.identity(wire, "tenant:acme")


def test_as_many_of_the_largest_namespaces_as_there_can_be_survive(supervisor: Supervisor) -> None:
    """And what was forgotten before them takes none of their space."""
    max_namespaces = PlannerOptions().max_namespaces
    assert len(largest(0).canonical()) <= MAX_IDENTITY_BYTES
    book = NamespaceBook(supervisor.keeper())
    present: dict[int, NamespaceIdentity] = {}
    book.present = lambda: present
    for number in range(1, 5 * max_namespaces):
        present[number] = largest(number)
        present.pop(number - max_namespaces, None)  # forgotten
        book.note(number, present[number])
    assert len(present) == max_namespaces
    book.close()
    again = NamespaceBook(supervisor.keeper())
    again.close()
    assert present.items() <= again.inherited.items()
    assert len(again.inherited) <= MAX_ENTRIES


def test_a_book_of_small_entries_leaves_space_for_all_that_come_with_them(supervisor: Supervisor) -> None:
    """A start names all that it finds, those that were forgotten included, and the cold store has others."""
    max_namespaces = PlannerOptions().max_namespaces
    book = NamespaceBook(supervisor.keeper())
    for number in range(1, 2 * MAX_ENTRIES):
        book.present = lambda number=number: {number: identity_of(number)}  # type: ignore[misc]
        book.note(number, identity_of(number))
    present = dict(book.identities)
    book.present = lambda: present
    stored = {number: largest(number) for number in range(100_000, 100_000 + max_namespaces)}
    present.update(stored)
    for one in stored.items():
        book.note(*one)
    book.close()
    again = NamespaceBook(supervisor.keeper())
    again.close()
    assert present.items() <= again.inherited.items()
