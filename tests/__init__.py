"""Tests: deterministic, on real components, able to fail."""
