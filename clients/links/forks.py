"""Forks: a client in a child process begins anew.

A fork copies the client but not what is behind it: parent and child would send on one socket, read each
other's answers, and take the same spans of one staging extent, so that the daemon stores one's bytes under
the other's name. So in the child every client forgets its connection, at once and without a message to the
daemon, and connects when it is used. What it had is the parent's: leases copied by the fork have ended in the
child, and end in the parent as ever.

A check of the process id in every call was rejected: it costs each of them, and a lock that a thread of the
parent held at the fork would still be held for ever.
"""

import os
import weakref
from typing import Protocol


class ForgetsConnection(Protocol):
    """A client with a connection that a child process must not share."""

    def forget_connection(self) -> None:
        """Forget the connection. Called in a child, where no other thread lives."""
        ...


_clients: "weakref.WeakSet[ForgetsConnection]" = weakref.WeakSet()


def reset_after_fork(client: ForgetsConnection) -> None:
    """Call `forget_connection` in every child that this process makes, as long as the client lives."""
    _clients.add(client)


def _in_child() -> None:
    for client in list(_clients):
        client.forget_connection()


os.register_at_fork(after_in_child=_in_child)
