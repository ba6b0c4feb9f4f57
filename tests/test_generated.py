"""What is generated is fresh."""

from . import generated


def test_generated_files_are_what_the_generators_write() -> None:
    assert generated.stale() == []
