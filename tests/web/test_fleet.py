"""The page beside other hosts: which are there, what came from where, and which one is gone."""

from pathlib import Path
from typing import Any

from ..e2e.fleet_hosts import CHAIN_BLOCKS, Host, fleet
from ..ports import free_port
from ..waiting import until
from .test_browser import WATCH, Seen

ROWS = "[...document.querySelectorAll('#fleet tbody tr')]"


def test_the_page_draws_the_fleet(browser: Any, tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as (first,):
        port = free_port()
        other = free_port()
        more = {"access.insecure": "true", "observe.http": f"127.0.0.1:{port}"}
        second = Host(tmp_path / "second", other, [first.address], more)
        try:
            second.daemon.start()
            second.register()
            first.put(1)
            until(lambda: second.read(1) == CHAIN_BLOCKS)
            page = browser.new_page()
            page.add_init_script(WATCH)
            seen = Seen(page, f"http://127.0.0.1:{port}/")
            seen.wait(f"{ROWS}.length === 1 && {ROWS}[0].innerText.includes('live')")
            assert first.address in seen.text("#fleet tbody")
            seen.wait("document.querySelector('#flow').innerText.includes('100 % of the blocks here')")
            assert first.daemon.stop() == 0
            seen.wait(f"{ROWS}[0].querySelector('.bad')?.innerText === 'down'")
            assert seen.page.evaluate("window.missing") == []
            assert seen.problems == []
        finally:
            second.daemon.close()
