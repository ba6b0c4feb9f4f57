"""Tests of bench/: a benchmark that cannot notice wrong bytes measures nothing."""
