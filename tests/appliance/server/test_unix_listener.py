"""A listener that cannot listen: the error names the setting, and nothing is left or taken away."""

from pathlib import Path

import pytest

from kvtier.appliance.errors import StartError
from kvtier.appliance.server.unix_listener import UnixListener


def test_what_could_not_start_stops_and_removes_nothing(tmp_path: Path) -> None:
    """Before: the error was hidden by another one, of a socket that was closed."""
    taken = tmp_path / "taken"
    taken.write_text("somebody's file")
    listener = UnixListener(taken, lambda accepted: None)
    with pytest.raises(StartError, match="change `listen`"):
        listener.start(0o600)
    listener.stop()
    assert taken.read_text() == "somebody's file"
