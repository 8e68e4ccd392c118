"""A headless browser, and checks of the pages that it opens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

# No requests to the vendor at the start: without a network, each of them costs time and prints an error.
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
              "--disable-component-update", "--disable-sync")
DESK = (1280, 800)
PHONE = (360, 740)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium; skip the test if it is not installed."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed; run: sudo apt-get install chromium (make test does so as root)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser,
    url: str,
    size: tuple[int, int] = DESK,
    scheme: Literal["light", "dark"] = "light",
    *,
    expected: str | None = None,
) -> Iterator[Page]:
    """Open the page at `url`. At the end, check that it has logged no message, except of requests that failed with
    `expected`, and requested nothing from other origins."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    complaints: list[str] = []
    requests: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if expected is None or not re.match(f"Failed to load resource: .*{expected}", message.text):
            complaints.append(f"{message.type}: {message.text}")

    def asked(request: Request) -> None:
        if not request.url.startswith((url, "data:,")):
            requests.append(request.url)

    page.on("console", said)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", asked)
    page.goto(url)
    yield page
    page.close()
    assert not complaints, complaints
    assert not requests, requests
