"""The connector against the installed vLLM's own classes; one suite per supported version, no model."""
