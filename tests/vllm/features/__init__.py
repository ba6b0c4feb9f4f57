"""What engines do beside answering prompts, a test each on the real engine: `make test-matrix` runs them in
every version's environment and writes docs/compatibility.md. A test passes, or it says what was refused, or
why the engine cannot do it here; the words are in the table.
"""
