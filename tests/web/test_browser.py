"""The page in a browser, fed by a daemon under load: what it draws is what the daemon says, and nothing runs
that is not ours."""

import re
import time
from collections.abc import Callable, Iterator
from signal import SIGKILL
from typing import Any

import pytest

from .conftest import HOSTILE, Site

PATIENCE_S = 120.0  # on a machine that does other things besides
#: Wraps what JSON.parse returns: reading a field that is not there is remembered.
WATCH = """
window.missing = [];
const watched = (value, path) => value === null || typeof value !== "object" ? value : new Proxy(value, {
  get: (target, key) => {
    const is_there = key in target || typeof key === "symbol";
    if (!is_there && !/\\.(block|next_block|name|urgencies)$|\\.(edge_bytes_per_s)\\./.test(`${path}.${key}`))
      window.missing.push(`${path}.${key}`);
    return watched(target[key], `${path}.${String(key)}`);
  } });
const parse = JSON.parse;
JSON.parse = (text) => watched(parse(text), "snapshot");
"""


class Seen:
    """A page, and whatever went wrong on it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)

    def _heard(self, message: Any) -> None:
        if message.type == "error" and "net::ERR_" not in message.text:
            self.problems.append(message.text)

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true in the page; return its value. From here: the page's content
        security policy lets nobody evaluate text inside."""
        deadline_at = time.monotonic() + PATIENCE_S
        while not (value := self.page.evaluate(condition)):
            assert time.monotonic() < deadline_at, f"never true: {condition}; {self.problems}"
            self.page.wait_for_timeout(100)
        return value

    def text(self, selector: str) -> str:
        """Return the words of an element."""
        return str(self.page.inner_text(selector))


Open = Callable[..., Seen]


@pytest.fixture
def look(browser: Any, site: Site) -> Iterator[Open]:
    """Open the page of `site`."""
    contexts = []

    def open_page(script: str = "", **options: Any) -> Seen:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        if script:
            page.add_init_script(script)
        return Seen(page, site.url)

    yield open_page
    for context in contexts:
        context.close()


def test_names_of_strangers_are_words_and_nothing_else(look: Open, site: Site) -> None:
    seen = look(WATCH)
    seen.wait("document.querySelectorAll('#sessions tbody th').length > 3")
    seen.wait(f"[...document.querySelectorAll('bdi')].some((e) => e.textContent === {HOSTILE!r})")
    assert seen.page.evaluate("window.wasHarmed === undefined && !document.querySelector('main img')")
    seen.wait("document.querySelectorAll('#decisions tbody tr').length > 1")
    assert seen.page.evaluate("window.missing") == []
    assert seen.problems == []
    assert [url for url in seen.requests if not url.startswith(site.url)] == []


def test_bars_are_to_scale_and_as_full_as_the_tiers(look: Open, site: Site) -> None:
    seen = look(reduced_motion="reduce")
    seen.wait("document.querySelectorAll('#edges tbody tr').length > 1")
    site.hush()
    seen.page.focus("#scale input[value=log]")
    seen.page.keyboard.press("ArrowRight")
    assert seen.page.is_checked("#scale input[value=linear]")
    tiers = site.snapshot()["tiers"]
    longest = max(tier["capacity_bytes"] for tier in tiers)
    at = {urgency: i for i, urgency in enumerate(tiers[0]["bytes_by_urgency"])}
    for row, tier in enumerate(tiers):
        track = f"document.querySelectorAll('#drawing .tier .track')[{row}].width.baseVal.value"
        length = seen.page.evaluate(track)
        assert length == pytest.approx(584 * tier["capacity_bytes"] / longest, abs=0.2)
        for urgency in at:
            selector = f"document.querySelectorAll('#drawing .tier')[{row}].querySelector('rect.{urgency}')"
            width = length * tier["bytes_by_urgency"][urgency] / tier["capacity_bytes"]
            seen.wait(f"Math.abs(({selector}?.width.baseVal.value ?? 0) - {width}) < 0.1")
    assert seen.problems == []


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_arrows_run_unless_that_is_not_wanted(look: Open, site: Site, motion: str) -> None:
    seen = look(reduced_motion=motion)
    seen.wait("document.querySelectorAll('#drawing .edge.put.busy').length > 0")
    running = "document.getAnimations().filter((a) => a.effect.target.matches('.flow')).length"
    if motion == "reduce":
        assert seen.page.evaluate(running) == 0
    else:
        assert seen.wait(f"{running} > 0")


def test_a_daemon_that_dies_is_not_drawn_as_if_it_lived(look: Open, site: Site) -> None:
    seen = look()
    seen.wait("document.body.dataset.link === 'live'")
    site.hush()
    site.daemon.signal(SIGKILL)
    seen.wait("document.body.dataset.link === 'stale'")
    assert "No word from the daemon since" in seen.text("#notice")
    site.daemon.close()
    site.daemon.start()
    seen.wait("document.body.dataset.link === 'live'")
    assert re.search(r"restarted at \d", seen.text("#link"))
    assert not seen.page.is_visible("#notice")
    assert seen.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_runs_out_of_the_page(look: Open, scheme: str, width: int) -> None:
    seen = look(color_scheme=scheme)
    seen.page.set_viewport_size({"width": width, "height": 900})
    seen.wait("document.querySelectorAll('#sessions tbody th').length > 3")
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    paper = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) < 128) == (scheme == "dark")
