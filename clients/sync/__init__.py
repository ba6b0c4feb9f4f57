"""The blocking client: Client and what its calls return.

client, handles and pages are generated from `aio/`; driver.py is this folder's own.
For users, and for the runtimes' connectors; no other folder imports it.
"""

from .client import Client
from .handles import Lease, Pin, Session
from .pages import Delivery, Pages

__all__ = ["Client", "Delivery", "Lease", "Pages", "Pin", "Session"]
