"""The asyncio client: AsyncClient and what its calls return. Also the source of the blocking client.

For users, and for the connectors of runtimes; no other folder imports it.

`sync/{client,handles,pages}.py` are generated from the files of the same names here by `make docs`
(tests/sync_source.py rewrites their tokens), and `make check` refuses stale ones. What a thread and an event
loop do differently is written twice: driver.py in either folder (lock, connection, retry, copies), and the
links. Rejected: a blocking client that runs an event loop on a thread (two switches of threads in every call,
and a loop in a process that forks); methods made at run time from a table (editors, type checkers and the
reference would see neither signatures nor docstrings); both by hand (291 of 315 lines were equal).
"""

from .client import AsyncClient
from .handles import AsyncLease, AsyncPin, AsyncSession
from .pages import AsyncDelivery, AsyncPages

__all__ = ["AsyncClient", "AsyncDelivery", "AsyncLease", "AsyncPages", "AsyncPin", "AsyncSession"]
