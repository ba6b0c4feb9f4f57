"""The blocking client: Client and what its calls return.

client, handles and pages are generated from `aio/`, and committed, so that a checkout works without being
built; driver.py is this folder's own. Rejected: a wrapper that runs the asyncio client on a thread. Each call
would wait for two switches of threads, longer than a small get out of shared memory takes, the thread would
not survive a fork, and type checkers would see awaitables.

For users, and for the runtimes' connectors; no other folder imports it.
"""

from .client import Client
from .handles import Lease, Pin, Session
from .pages import Delivery, Pages

__all__ = ["Client", "Delivery", "Lease", "Pages", "Pin", "Session"]
