"""`kvtier.testing`: what tests of code that uses kvtier need. See clients/testing.py."""

from .clients.testing import ConnectorCheck, FakeAppliance, RuntimeUnderTest, connector_checks

__all__ = ["ConnectorCheck", "FakeAppliance", "RuntimeUnderTest", "connector_checks"]
