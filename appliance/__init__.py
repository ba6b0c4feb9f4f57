"""The daemon: transports, the pure planner, execution of its copies, and the tools around them.

The order of its folders is held by a contract in pyproject.toml and drawn in ARCHITECTURE.md. `appliance.py`
is where an event becomes instructions; `errors.py` has every operating error.
"""
