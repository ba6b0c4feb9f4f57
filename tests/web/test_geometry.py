"""Where the words of the page lie, as Chromium lays them out: no two overlap, none leaves its card.

With one, two and three tiers, empty, filled and after a restart, in windows from wide to narrow.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import TIERS, Site
from .test_browser import Seen

WIDTHS = (1600, 1280, 1100, 1040, 900, 700, 420, 400, 340)
SLACK = 1.5  # pixels by which boxes of words may overlap: line boxes are taller than letters
ENOUGH_TURNS = 40
#: Every run of words that can be seen, as [words, number of its node, left, top, right, bottom], cut by what
#: scrolls.
BOXES = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let node_number = 0;
  while (walker.nextNode()) {
    node_number += 1;
    const node = walker.currentNode;
    const words = node.data.trim();
    const holder = node.parentElement;
    if (!words || holder.closest(".hidden, title, noscript, [hidden], script")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      let box = [rect.left, rect.top, rect.right, rect.bottom];
      for (let at = holder; at && at !== document.body; at = at.parentElement) {
        if (at instanceof SVGElement || getComputedStyle(at).overflow === "visible") continue;
        const edge = at.getBoundingClientRect();
        box = [Math.max(box[0], edge.left), Math.max(box[1], edge.top),
               Math.min(box[2], edge.right), Math.min(box[3], edge.bottom)];
      }
      if (box[2] - box[0] > 1 && box[3] - box[1] > 4) found.push([words, node_number, ...box]);
    }
  }
  return found;
})()
"""
#: Words of the drawings that leave the drawing, or the card in which they begin.
RUN_OUT = """
(() => {
  const out = [];
  for (const drawing of document.querySelectorAll("#drawing, #history")) {
    const all = drawing.getBoundingClientRect();
    const plates = [...drawing.querySelectorAll(".plate")].map((plate) => plate.getBoundingClientRect());
    for (const words of drawing.querySelectorAll("text")) {
      const box = words.getBoundingClientRect();
      const holders = plates.filter((plate) => plate.left <= box.left && box.left < plate.right &&
                                               plate.top <= box.top && box.top < plate.bottom);
      for (const holder of [all, ...holders])
        if (box.left < holder.left - 1 || box.right > holder.right + 1 || box.bottom > holder.bottom + 3)
          out.push(words.textContent);
    }
  }
  return out;
})()
"""


def overlaps(boxes: list[list[Any]]) -> list[str]:
    """Return which boxes of words cover each other."""
    found = []
    for i, (one, number, left, top, right, bottom) in enumerate(boxes):
        for other, number_2, left_2, top_2, right_2, bottom_2 in boxes[i + 1 :]:
            if number == number_2:
                continue  # an ellipsis has a box of its own
            across = min(right, right_2) - max(left, left_2)
            down = min(bottom, bottom_2) - max(top, top_2)
            if across > SLACK and down > SLACK + 0.2 * min(bottom - top, bottom_2 - top_2):
                found.append(f"{one!r} over {other!r} by {across:.0f} x {down:.0f}")
    return found


def look_at(seen: Seen, what: str) -> None:
    """Look at the page in every width, with both scales."""
    problems = []
    for width in WIDTHS:
        seen.page.set_viewport_size({"width": width, "height": 900})
        for scale in ("linear", "log"):
            seen.page.check(f"#scale input[value={scale}]")
            boxes = seen.page.evaluate(BOXES)
            assert len(boxes) > 30, "nothing was drawn"
            where = f"{what}, {width} px, {scale}"
            problems += [f"{where}: {overlap}" for overlap in overlaps(boxes)]
            problems += [f"{where}: {words!r} runs out" for words in seen.page.evaluate(RUN_OUT)]
            if seen.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                problems.append(f"{where}: the page is wider than its window")
    assert problems == []


@pytest.fixture(params=[1, 2, 3], ids=["one tier", "two tiers", "three tiers"])
def quiet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site whose daemon runs and whose conversations have not begun."""
    tiers = {1: ("dram",), 2: ("dram", "nvme"), 3: TIERS}[request.param]
    site = Site(tmp_path, names=(), pace=30.0, tiers=tiers)
    try:
        site.daemon.start()
        yield site
    finally:
        site.close()


def test_no_words_lie_over_others(browser: Any, quiet: Site) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    seen = Seen(context.new_page(), quiet.url)
    seen.wait("document.querySelectorAll('#edges td').length > 0")
    look_at(seen, "empty")
    quiet.play()
    while quiet.chats.num_turns < ENOUGH_TURNS:
        seen.page.wait_for_timeout(100)
    look_at(seen, "busy")
    quiet.hush()
    if len(quiet.snapshot()["tiers"]) > 1:
        quiet.daemon.close()
        quiet.daemon.start()
        seen.wait("document.body.dataset.link === 'live' && /restarted/.test(document.body.innerText)")
        seen.wait("/no session/.test(document.querySelector('#drawing').textContent)")
        look_at(seen, "after a restart")
    assert seen.problems == []
    context.close()
