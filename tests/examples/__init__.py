"""Tests of what examples/ offers for reuse."""
