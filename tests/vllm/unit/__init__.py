"""The connector's pure parts and its threads, against the real client and a FakeAppliance; no vLLM here."""
