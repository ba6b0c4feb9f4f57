"""The scorecard of reliability: what was run, how often, on which commit, and what it showed.

rows.py says how each figure is made, record.py keeps what was run in docs/data/reliability.json, page.py
writes docs/reliability.md from it. `python -m tests.scorecard` (`make scorecard`) runs the rows and adds
what they showed.
"""
