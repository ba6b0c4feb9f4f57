"""The connector in vLLM's worker processes: moves blocks between the engine's pages and the daemon.

Imported by connector.py and describe.py only; never imports the scheduler's folder.
"""
