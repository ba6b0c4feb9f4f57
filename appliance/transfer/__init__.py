"""Executes the planner's copies: queues per edge, the most urgent batch first, tenants in turn.

Decides nothing about placement; the planner in `core` does.
Imported by `appliance.py` and everything above it.
"""
