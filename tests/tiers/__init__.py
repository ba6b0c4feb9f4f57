"""Tests of tiers/: memory, staging, index, copies, and the attacks of a hostile client."""
