"""A daemon over a store that keeps nothing says so everywhere; over stores that work, it does not."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from hicache.backends.guard.health import CONFIRM_S
from hicache_lab.devservers import ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK
from tests.admin.ctl import Ctl
from tests.browser import DESK, PHONE, chromium, opened
from tests.daemon.daemons import Client, Daemon, keys_of, write
from tests.daemon.test_metrics import parsed
from tests.waiting import wait_for

pytestmark = [pytest.mark.servers, pytest.mark.long]
FLOOR = "free_space_floor is 900.0 TiB"
KEEPS_NOTHING = "hicache_backend_keeps_nothing"


def two_levels(folder: Path) -> dict[str, Any]:
    """Return a storage with a store that works over one whose volume has no room."""
    levels = [
        {"name": name, "type": "file", "options": {"path": str(folder / name), "free_space_floor": floor}}
        for name, floor in (("good", "0B"), ("full", "900TiB"))
    ]
    return {"type": "levels", "options": {"levels": levels}}


def healths(daemon: Daemon) -> dict[str, str]:
    """Return the state of each store."""
    (namespace,) = daemon.status()["namespaces"]
    return {store["name"]: store["health"]["state"] for store in namespace["stores"]}


def gauges(client: Client) -> dict[str, float]:
    """Return the metric of each store."""
    found = parsed(client.call("GET", "/metrics")[1].decode())
    return {dict(labels)["backend"]: value for (name, labels), value in found.items() if name == KEEPS_NOTHING}


def test_a_store_without_room_is_named_with_its_reason_wherever_people_look(scratch: Path) -> None:
    daemon = Daemon(scratch, storage=two_levels(scratch))
    with daemon, contextlib.closing(daemon.client()) as client:
        client.open()
        assert f"{scratch}/full: {FLOOR}, and the file system has " in daemon.log, "at the start"
        assert f"{scratch}/good: " not in daemon.log
        assert daemon.ask("GET", "/readyz") == (200, {"state": "ready"})
        assert Ctl(("--socket", str(daemon.socket))).quick("status").code == 0
        number = itertools.count()

        def store() -> None:
            assert write(client, keys_of(3, f"chain {next(number)}"))[1]["outcomes"] == ["stored"] * 3

        # The daemon's clock cannot be moved.
        wait_for(lambda: healths(daemon)["full"] == "keeps_nothing", store, timeout_s=CONFIRM_S + 45.0, pause_s=0.2)
        assert healths(daemon)["good"] == "working"
        code, answer = daemon.ask("GET", "/readyz")
        (problem,) = answer.pop("problems")
        assert (code, answer) == (200, {"state": "degraded"})
        assert (problem["store"], problem["state"], problem["cause"]) == ("full", "keeps_nothing", "rejected")
        assert str(scratch) not in str(problem), "a probe needs no token, so it has no paths"
        assert abs(time.time() - problem["since_s"] - CONFIRM_S) < 60.0
        shown = Ctl(("--socket", str(daemon.socket))).quick("status").out
        assert "degraded" in shown.splitlines()[0] and FLOOR in shown.splitlines()[1]
        assert shown.splitlines()[1].startswith("  PROBLEM: full keeps nothing since 20")
        assert re.search(r"^full .* ok +keeps nothing ", shown, re.MULTILINE)
        assert gauges(client) == {"good": 0.0, "full": 1.0}
        wait_for(lambda: "storage full: keeps nothing" in daemon.log)
        assert daemon.log.count("keeps nothing (this began") == 1 and "storage good" not in daemon.log
        look_at_the_page(daemon)


def test_a_redis_that_is_dead_when_the_daemon_starts_is_named_until_it_answers_and_when_it_dies_again(
    scratch: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ValkeyServer())
        server.kill()
        options = {"url": f"redis://{LOOPBACK}:{server.port}"}
        daemon = stack.enter_context(Daemon(scratch, storage={"type": "redis", "options": options}))
        client = stack.enter_context(contextlib.closing(daemon.client()))
        client.open()
        wait_for(lambda: state_and_problem(daemon) == ("degraded", "storage", "not_open"))
        assert gauges(client) == {"storage": 1.0}
        shown = Ctl(("--socket", str(daemon.socket))).quick("status").out.splitlines()
        assert "degraded" in shown[0] and shown[1].startswith("  PROBLEM: storage keeps nothing since 20")
        assert str(server.port) in shown[1] and "it is opened again by itself" in shown[1]
        with chromium() as browser, opened(browser, f"http://127.0.0.1:{daemon.port}/") as page:
            expect(page.locator("#state")).to_have_text("◐ degraded")
            expect(page.locator("#problems li")).to_contain_text("storage keeps nothing since")
            expect(page.locator("#guards tr", has_text="storage")).to_contain_text("■ not open")
        server.start()
        # The pauses between attempts have grown.
        wait_for(lambda: daemon.ask("GET", "/readyz") == (200, {"state": "ready"}), timeout_s=90.0)
        assert gauges(client) == {"redis": 0.0}
        server.kill()
        number = itertools.count()

        def store() -> None:
            assert write(client, keys_of(3, f"chain {next(number)}"))[1]["outcomes"] == ["stored"] * 3, "by the pool"

        wait_for(lambda: state_and_problem(daemon) == ("degraded", "redis", "connection_refused"), store)
        assert gauges(client) == {"redis": 1.0}
        server.start()
        wait_for(lambda: daemon.ask("GET", "/readyz") == (200, {"state": "ready"}))  # the probes find out


def state_and_problem(daemon: Daemon) -> tuple[str, str | None, str | None]:
    """Return the state of the daemon, and the store and cause of its first problem."""
    answer = daemon.ask("GET", "/readyz")[1]
    first = (answer.get("problems") or [{}])[0]
    return answer["state"], first.get("store"), first.get("cause")


def look_at_the_page(daemon: Daemon) -> None:
    """Check the daemon's page, on a wide and on a narrow screen."""
    with chromium() as browser:
        for size in (DESK, PHONE):
            with opened(browser, f"http://127.0.0.1:{daemon.port}/", size) as page:
                expect(page.locator("#state")).to_have_text("◐ degraded")
                expect(page.locator("#problems li")).to_have_count(1)
                expect(page.locator("#problems li")).to_contain_text("full keeps nothing since")
                expect(page.locator("#problems li")).to_contain_text(FLOOR)
                expect(page.locator("#guards tr", has_text="full")).to_contain_text("■ keeps nothing")
                expect(page.locator("#faults")).to_contain_text("pages rejected", timeout=60_000)
                assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
