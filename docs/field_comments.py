"""Extension of griffe: what a comment says about a field becomes the field's text in the reference.

Fields of our value objects are explained behind them (`load_s: float  # estimated time ...`) or above them
(`#: ...`), beside the field in the class. griffe reads docstrings only.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension

_BEHIND = re.compile(r".*?  # (.+)$")
_ABOVE = re.compile(r"\s*#: ?(.*)$")


class FieldComments(Extension):
    """Gives attributes without a docstring the text of their comment."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Set the docstring of one attribute, if its source has a comment."""
        if attr.docstring is None and attr.lineno and (text := self._comment(attr, attr.lineno)):
            attr.docstring = Docstring(text[0].upper() + text[1:] + ".", parent=attr)

    def _comment(self, attr: Attribute, lineno: int) -> str:
        lines = attr.lines_collection[attr.filepath]
        if behind := _BEHIND.match(lines[(attr.endlineno or lineno) - 1]):
            return behind[1].rstrip(".")
        above: list[str] = []
        for line in reversed(lines[: lineno - 1]):
            if not (found := _ABOVE.match(line)):
                break
            above.insert(0, found[1])
        return " ".join(above).rstrip(".")
