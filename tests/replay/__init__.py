"""Tests of replay: traces in, the production planner, numbers out."""
