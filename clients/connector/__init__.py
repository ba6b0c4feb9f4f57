"""What the connectors of all runtimes share: guard and breaker, chains of opaque blocks, layouts, options.

Imported by the runtimes' packages only; imports the blocking client and everything below it.
"""
