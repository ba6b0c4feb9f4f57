"""What is stored and where: columns of all blocks, their state machine, and what protects a block.

`core_state.py` is the context that every part of the core gets; `transitions.py` alone writes states.
Imports no other folder of the core; imported by all of them.
"""
