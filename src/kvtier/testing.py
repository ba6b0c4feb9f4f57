"""`kvtier.testing`: what tests of code that uses kvtier need. See clients/testing.py."""

from .clients.testing import FakeAppliance

__all__ = ["FakeAppliance"]
