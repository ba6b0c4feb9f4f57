"""Prints, after the tests, each figure that one of them recorded (`record_property`), for rows.py to read.

Loaded by `-p tests.scorecard.figures`.
"""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line `figure NAME NUMBER` for each."""
    for report in terminalreporter.getreports("passed"):
        for name, number in report.user_properties:
            if report.when == "call":
                terminalreporter.write_line(f"figure {name} {number}")
