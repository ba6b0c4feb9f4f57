"""The planner: events in, instructions out. Pure: no clock, no await, no I/O, no randomness.

planner > changes, inspection > requests > promotion > capacity > copying > catalog; `events.py`,
`instructions.py`, `results.py` and `options.py` are what crosses its border. Imported by the daemon,
by replay and by the simulator.
"""
