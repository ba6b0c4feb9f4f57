"""Pictures: figures drawn with matplotlib, as a file or inside a page that loads nothing.

matplotlib is an extra (`kvtier[charts]`): a daemon never draws. It is imported when a figure is made, so that
a command without a picture neither needs it nor waits half a second for it. pyplot is left out: it keeps
figures in a global table and looks for a screen. Text in SVG stays text: it can be searched, and read
aloud.
"""

import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".png", ".svg")
#: Okabe and Ito's colours, which people with any colour vision can tell apart; dashes for prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B6D2E")
DASHES = ("-", "--", ":", "-.")
BOUND_COLOUR = "#777777"
_DPI = 150


class CannotDraw(ValueError):
    """A picture cannot be made; the message says what to do."""


def check_target(path: Path) -> None:
    """Raises CannotDraw when `save` could not write a picture to `path`, for before the work.

    Whether matplotlib is there is not asked: `check_drawing` does that.
    """
    if path.suffix not in SUFFIXES:
        raise CannotDraw(f"{path}: a picture ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise CannotDraw(f"{path}: there is no folder {path.parent}")


def check_drawing() -> None:
    """Raises CannotDraw without matplotlib."""
    new_figure(1, 1)


def new_figure(width_in: float, height_in: float) -> "Figure":
    """Return an empty figure. Raises CannotDraw without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise CannotDraw(
            "pictures need matplotlib; install it with pip install 'kvtier[charts]'"
        ) from missing
    return Figure(figsize=(width_in, height_in), layout="constrained")


def svg_of(figure: "Figure") -> str:
    """Return a figure as an `<svg>` element, the same text for the same figure."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvtier"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def save(path: Path, title: str, figure: "Figure") -> None:
    """Write a figure as `.png`, `.svg`, or a page of its own (`.html`). Raises OSError."""
    match path.suffix:
        case ".png":
            figure.savefig(path, dpi=_DPI)
        case ".svg":
            path.write_text(svg_of(figure), encoding="utf-8")
        case _:
            path.write_text(
                f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
                f'<body style="margin:24px">{svg_of(figure)}</body></html>\n',
                encoding="utf-8",
            )
