"""Take the screenshots of the daemon's page for the documentation: `python -m tests.daemon.screenshots FOLDER`.

Takes a minute. Two engines use a daemon, and one of its stores fails for a few seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser

from tests.browser import DESK, PHONE, chromium, opened
from tests.daemon.traffic import BusyDaemon

SECONDS = 60
LABELS = ("llama-3-70b tp0", "llama-3-70b tp1")


def traffic(daemon: BusyDaemon) -> None:
    """Generate load that rises and falls, with a store that fails in the middle and at the end."""
    began_s, number = time.monotonic(), 0
    while (passed_s := time.monotonic() - began_s) < SECONDS:
        daemon.serve(rounds=1 + number % 3, pages=(8, 16, 24, 12)[number // 8 % 4])
        number += 1
        is_broken = (daemon.folder / "away").exists()
        if is_broken != (SECONDS * 0.5 < passed_s < SECONDS * 0.6 or passed_s > SECONDS * 0.9):
            daemon.repair_shared() if is_broken else daemon.break_shared()
        time.sleep(0.4)


def screenshot(
    browser: Browser, daemon: BusyDaemon, path: Path, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    """Take a screenshot of the upper part of the page."""
    with opened(browser, daemon.url, size, scheme) as page:
        page.locator("#hits svg .mark").first.wait_for(state="attached")
        page.wait_for_timeout(1500)  # until the animation of the bars ends
        page.screenshot(path=path, clip={"x": 0, "y": 0, "width": size[0], "height": 1.5 * size[1]}, full_page=True)


def main(folder: Path) -> None:
    """Write both screenshots."""
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser, BusyDaemon(Path(scratch), LABELS) as daemon:
        traffic(daemon)
        screenshot(browser, daemon, folder / "daemon-page-light.png", DESK, "light")
        screenshot(browser, daemon, folder / "daemon-page-dark-phone.png", PHONE, "dark")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
