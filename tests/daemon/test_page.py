"""The daemon's page in a real browser, from a real daemon with traffic: it shows the values of `/statusz`."""

from __future__ import annotations

import re
import shutil
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from hicache_lab.conformance import empty_frames, full_frames, make_keys, soon
from tests.browser import DESK, PHONE, chromium, opened
from tests.daemon.daemons import secret
from tests.daemon.traffic import LABELS, MARKUP, BusyDaemon
from tests.waiting import wait_for

pytestmark = [pytest.mark.servers, pytest.mark.long]
PAGE_BYTES_MAX = 40 << 10

# Return each visible text with its colour and the colour of its background.
_COLOURS = """() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility() || element.closest("svg")) continue;
    let behind = element;
    while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const ground = getComputedStyle(behind ?? document.body).backgroundColor;
    found.push([node.textContent.trim(), getComputedStyle(element).color, ground]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def daemon() -> Iterator[BusyDaemon]:
    folder = Path(tempfile.mkdtemp(prefix="hicache-test-"))
    with BusyDaemon(folder) as made:
        made.serve()
        yield made
    shutil.rmtree(folder)


def at(status: Any, path: str) -> Any:
    """Return the value of a snapshot at a path such as `namespaces.0.stores.1.usage.bytes`."""
    for part in path.split("."):
        status = status[int(part)] if isinstance(status, list) else status[part]
    return status


def shown(page: Page) -> dict[str, Any]:
    """Return the exact values on the page by their path in `/statusz`; the value of a breaker is its state."""
    found = page.eval_on_selector_all("[data-path]", "all => all.map(e => [e.dataset.path, e.title, e.textContent])")
    values: dict[str, Any] = {}
    for path, title, text in found:
        digits = re.sub(r"[^0-9]", "", title)
        values[path] = int(digits) if digits else text.split(" ", 1)[1].replace(" ", "_")
    return values


def luminance(colour: str) -> float:
    """Return the "relative luminance" of WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_files_of_the_page_are_small() -> None:
    files = (Path(__file__).resolve().parents[2] / "hicache/daemon/page").glob("*.[hcj]*")
    assert sum(path.stat().st_size for path in files if path.suffix != ".py") < PAGE_BYTES_MAX


def test_the_page_shows_the_values_of_the_status(browser: Browser, daemon: BusyDaemon) -> None:
    with opened(browser, daemon.url) as page:
        expect(page.locator("#state")).to_have_text("● ready")
        paths = {"pool.used_bytes", "namespaces.0.stores.0.usage.bytes", "namespaces.0.stores.1.usage.bytes",
                 "namespaces.1.stores.1.guard.breakers.write.state", "in_flight_requests"}
        # The daemon may still copy between its levels, so compare until the values agree.
        wait_for(lambda: shown(page).get("namespaces.0.stores.1.usage.bytes", 0) > 0, pause_s=0.1)

        def agree() -> bool:
            status, values = daemon.status(), shown(page)
            return paths <= set(values) and all(value == at(status, path) for path, value in values.items())

        wait_for(agree, pause_s=0.1)
        assert page.locator("#problems").inner_text().endswith("None: no store has a problem.")
        # The page shows the value in units, and has the exact value in the tooltip.
        capacity = page.locator("[data-path='pool.capacity_bytes']")
        assert (capacity.inner_text(), capacity.get_attribute("title")) == ("16.0 MiB", "16,777,216 bytes")


def test_the_charts_show_the_traffic_as_images_and_as_text(browser: Browser, daemon: BusyDaemon) -> None:
    with opened(browser, daemon.url) as page:
        daemon.serve(engines=1)
        for chart in ("hits", "engines", "stores"):
            expect(page.locator(f"#{chart} svg .mark").first).to_be_attached(timeout=60_000)
        wait_for(lambda: "of" in page.locator("#hits-figure").inner_text(), pause_s=0.1)
        chart_image = page.locator("#engines svg[role=img]")
        label = chart_image.get_attribute("aria-label") or ""
        assert re.search(r"Transfers with engines, last \d+ minutes. [\d:]+: to engines .*/s, from engines .*/s", label)
        # With the keyboard: select the previous sample, then open the table.
        chart_image.focus()
        page.keyboard.press("ArrowLeft")  # the newest sample; it stays selected when another one arrives
        newest = page.locator("#engines-now").inner_text()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#engines-now").inner_text() != newest
        page.locator("#engines summary").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#engines-table tbody tr").first).to_contain_text("/s")
        page.get_by_label("1 hour").check()
        expect(page.locator("#hits svg .mark").first).to_be_attached()


def test_the_page_says_why_pages_were_missed(browser: Browser, daemon: BusyDaemon) -> None:
    with daemon.engine(LABELS[0]) as engine:
        keys = make_keys(4, "cleared")
        engine.batch_set(keys, full_frames(engine.codec, keys), parent=None, deadline=soon())
        engine.clear(deadline=soon())
        engine.batch_get(keys, empty_frames(engine.codec, 4), deadline=soon())
    with opened(browser, daemon.url) as page:
        row = page.locator("#missed tbody tr").filter(has_text="evicted: cleared")
        expect(row).to_contain_text("removed on request")
        expect(row.locator("td").nth(2)).to_have_text("4", timeout=60_000)  # with the next sample
        totals: Counter[str] = Counter()
        for one in daemon.status()["namespaces"]:
            for reason, details in one["sharing"]["missed"].items():
                for detail, pages in details.items():
                    totals[f"{reason}: {detail}" if detail else reason] += pages
        rows = [one.split("\t") for one in page.locator("#missed tbody").inner_text().splitlines()]
        assert {line[0].strip(): int(line[-1].replace(",", "")) for line in rows} == totals
        assert totals["new"] and totals["evicted: cleared"] == 4


def test_a_label_with_markup_is_shown_as_text(browser: Browser, daemon: BusyDaemon) -> None:
    with opened(browser, daemon.url) as page:  # fails if the page tries to run the handler
        expect(page.locator("#namespaces")).to_contain_text(MARKUP)
        assert page.locator("img, main b").count() == 0
    # The control: parsed as markup, the same text is an image, whose handler would run.
    with opened(browser, "about:blank") as blank:
        assert blank.evaluate("text => new DOMParser().parseFromString(text, 'text/html').images.length", MARKUP) == 1


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen_and_has_enough_contrast(
    browser: Browser, daemon: BusyDaemon, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    with opened(browser, daemon.url, size, scheme) as page:
        expect(page.locator("#namespaces tbody tr")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        colours = page.evaluate(_COLOURS)
        assert len(colours) > 50
        assert not [found for found in colours if contrast(*found[1:]) < 4.5]
        assert (luminance(colours[0][2]) < 0.1) == (scheme == "dark")


def test_a_failing_store_is_shown_as_a_problem_until_it_works_again(browser: Browser, daemon: BusyDaemon) -> None:
    with opened(browser, daemon.url) as page:
        daemon.break_shared()
        problems = page.locator("#problems")

        def serve() -> None:
            daemon.serve(engines=1, rounds=1, pages=4)

        wait_for(lambda: "shared" in problems.inner_text(), serve, pause_s=0.1)
        expect(page.locator("#guards .bad").first).to_contain_text("■ open")
        assert re.search(r"shared keeps nothing since [\d:]+ \(.*\): its directory was moved, .*\. Move it back",
                         problems.inner_text())
        expect(page.locator("#state")).to_have_text("◐ degraded")
        assert "(1)" in page.title() or "(2)" in page.title()
        expect(page.locator("#faults")).to_contain_text("breaker opened", timeout=60_000)
        daemon.repair_shared()
        wait_for(lambda: "None" in problems.inner_text(), serve, pause_s=0.1)


def test_a_daemon_that_does_not_answer_is_shown_with_the_age_of_the_values_until_it_is_back(
    browser: Browser, daemon: BusyDaemon
) -> None:
    # Requests that are under way when the daemon is killed fail in various ways: no answer, a part of one, a reset.
    with opened(browser, daemon.url, expected="net::ERR_") as page:
        expect(page.locator("#state")).to_have_text("● ready")
        run = page.locator("#facts").inner_text()
        daemon.kill()
        expect(page.locator("#state")).to_have_text("■ unreachable", timeout=60_000)
        assert re.search(
            r"does not answer: no connection. The values below are from \d", page.locator("#banner").inner_text()
        )
        daemon.start()
        expect(page.locator("#state")).to_have_text("● ready", timeout=60_000)
        expect(page.locator("#banner")).to_be_hidden()
        assert page.locator("#facts").inner_text() != run


def test_beyond_loopback_the_page_asks_for_the_token(browser: Browser, tmp_path: Path, scratch: Path) -> None:
    token = "for-engines-" + "2" * 20
    made = BusyDaemon(scratch, token_file=secret(tmp_path, "token", token))
    made.listen_everywhere()
    with made, opened(browser, made.url, expected="status of 401") as page:
        expect(page.locator("#banner")).to_contain_text("it requires a token")
        assert not page.locator("#namespaces thead").count()
        for entered, state in (("wrong", "■ unreachable"), (token, "● ready")):
            page.locator("#token").fill(entered)
            page.keyboard.press("Enter")
            expect(page.locator("#state")).to_have_text(state)
        expect(page.locator("#login")).to_be_hidden()


def test_the_content_policy_of_the_page_allows_only_its_own_scripts(daemon: BusyDaemon) -> None:
    for name in ("", "page.css", "page.js"):
        with urllib.request.urlopen(f"{daemon.url}{name}", timeout=60) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            text = answer.read().decode()
            assert not re.search(r"\bon\w+=|style=|innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
