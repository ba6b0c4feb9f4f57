"""The book of namespaces: what it holds over a crash, and that it never fills up."""

import mmap
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from kvtier.appliance.persisted.namespace_book import NAME, NamespaceBook
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.memory.keeper import Keeper

GEOMETRY = Geometry(8, 1, 64, 16, "float16")
NUM_BYTES = 4096


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
            mapping = mmap.mmap(self.descriptor, NUM_BYTES)
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
    book = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    book.close()
    return book.identities


def inherited(supervisor: Supervisor) -> dict[int, NamespaceIdentity]:
    """Return what a daemon takes over that dies at once."""
    book = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    book.close()
    assert book.inherited.items() <= book.identities.items()
    return book.inherited


def test_namespaces_keep_their_ids_over_a_crash(supervisor: Supervisor) -> None:
    book = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    noted = {4_000_000_000: identity_of(1), 7: identity_of(2)}
    for number, identity in noted.items():
        book.note(number, identity)
    book.close()
    assert reopened(supervisor) == noted


def test_a_full_book_is_written_anew_with_the_namespaces_that_there_are(supervisor: Supervisor) -> None:
    book = NamespaceBook(supervisor.keeper(), NUM_BYTES)
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
    book = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    for number, identity in noted.items():
        book.note(number, identity)
    book.erase("tenant:acme")
    book.note(7, noted[7])  # its clients register again
    book.close()
    for _ in range(2):  # the second time as if the daemon between had died before it read all slots
        second = NamespaceBook(supervisor.keeper(), NUM_BYTES)
        assert (second.inherited, second.identities) == ({8: other}, noted)
        second.close()
    third = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    third.slots_read()
    third.close()
    fourth = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    assert fourth.inherited == noted
    fourth.erase("tenant:acme")
    fourth.admit("tenant:acme")
    fourth.close()
    assert inherited(supervisor) == noted


def test_a_book_that_is_full_while_a_tenant_is_erased_names_nothing_of_it(supervisor: Supervisor) -> None:
    book = NamespaceBook(supervisor.keeper(), NUM_BYTES)
    others = (NamespaceIdentity(n.to_bytes(16), GEOMETRY, domain="tenant:bolt") for n in range(1000))
    present = {7: identity_of(1)}
    book.present = lambda: present
    book.note(7, present[7])
    book.erase("tenant:acme")
    for number in range(10, 100):
        book.note(number, next(others))
        assert 7 not in inherited(supervisor)
    book.close()
