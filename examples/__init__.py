"""Things to run and to read: `python -m examples.demo`, `python -m examples.quickstart`."""
