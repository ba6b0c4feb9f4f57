"""Tests of what stands in examples/ beside the demo itself."""
