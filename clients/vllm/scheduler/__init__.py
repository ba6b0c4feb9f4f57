"""The connector in vLLM's scheduler process: looks up, pins, plans loads and saves; moves no bytes.

Imported by connector.py only; imports plan.py, which carries its decisions to the workers.
"""
