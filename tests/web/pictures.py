"""`python -m tests.web.pictures FOLDER [--tiers]`: photographs the page of a daemon under load, in light and
in dark; with `--tiers` those of daemons with one, two and three tiers.

The pictures of docs/pictures/ are made so (`make pictures`). Needs what the browser tests need.
"""

import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from .conftest import TIERS, Site, chromium

WARM_UP_S = 90.0  # until nvme is full and the chart has something to say
WIDTH = 1280
PICTURES = {"page-light": ("light", 1222), "page-dark": ("dark", 728)}
PATIENCE_MS = 240_000.0


def main(folder: Path, sites: dict[str, tuple[str, ...]], warm_up_s: float) -> None:
    """Write the pictures: of each site, named by its prefix, in light and in dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, tiers in sites.items():
        with tempfile.TemporaryDirectory(prefix="kvtier-pictures-") as data, sync_playwright() as playwright:
            site = Site(Path(data), names=(), pace=12.0, tiers=tiers)
            site.start()
            try:
                time.sleep(warm_up_s)
                browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
                for name, (scheme, height) in PICTURES.items():
                    page = browser.new_page(
                        viewport={"width": WIDTH, "height": height},
                        color_scheme=scheme,
                        reduced_motion="reduce",
                    )
                    page.goto(site.url)
                    page.wait_for_selector("body[data-link=live] #edges td", timeout=PATIENCE_MS)
                    page.screenshot(path=folder / f"{prefix}{name}.png", timeout=PATIENCE_MS)
                    page.close()
                browser.close()
            finally:
                site.close()


if __name__ == "__main__":
    if "--tiers" in sys.argv:
        wanted = {"1-tier-": ("dram",), "2-tiers-": ("dram", "nvme"), "3-tiers-": TIERS}
        main(Path(sys.argv[1]), wanted, warm_up_s=15.0)
    else:
        main(Path(sys.argv[1]), {"": TIERS}, WARM_UP_S)
