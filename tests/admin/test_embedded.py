"""The admin surface of a cache inside a running engine, over its Unix socket."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.admin import embedded, serve_configured
from hicache.admin.jobs import UNFINISHED_MAX
from hicache.backends.file.inspection import FileInspection
from hicache.backends.guard import CONFIRM_S
from hicache.backends.stored import StoredPages
from hicache.cache import create_cache, create_host_cache
from hicache.config.storage import FileStorageOptions
from hicache.frame import HEADER_BYTES
from tests.admin.ctl import Ctl
from tests.admin.running import DIGEST, IDS, KEYS, PROMPT, RunningEngine, ask, file_config
from tests.cache.world import NAMESPACE, prompt
from tests.log_records import messages_of
from tests.mounted import MountedSecret
from tests.waiting import wait_for

TOKENS = {"ids": IDS}


@pytest.fixture
def served(engine: RunningEngine) -> RunningEngine:
    """An engine that has served PROMPT, so that PROMPT is on every tier."""
    engine.serve("a", PROMPT)
    engine.settle()
    return engine


def stored_pages(folder: Path) -> int:
    """Return the number of pages in the file store."""
    return sum(1 for _ in StoredPages(FileInspection(None, FileStorageOptions(path=folder / "store")), "file").pages())


def pages_shown(engine: RunningEngine) -> int | None:
    """Return the store's number of pages, from a measurement that may be a tenth of a second old."""
    pages: int | None = engine.ask("GET", "/status")["stores"][0]["pages"]
    return pages


# Reading


def test_storage_that_cannot_be_opened_is_a_problem_with_its_reason(tmp_path: Path) -> None:
    config = file_config(tmp_path, storage={"type": "remote", "options": {"socket": tmp_path / "daemon.sock"}})
    with RunningEngine(config) as engine:
        wait_for(lambda: bool(engine.ask("GET", "/status")["stores"]))
        found = engine.ask("GET", "/status")
        (store,) = found["stores"]
        assert (found["state"], store["name"], store["write"]) == ("degraded", "storage", None)
        assert (store["health"]["state"], store["health"]["cause"]) == ("keeps_nothing", "not_open")
        assert "daemon.sock" in store["health"]["what"]
        shown = Ctl(("--socket", str(config.admin.socket))).quick("status").out
        assert "PROBLEM: storage keeps nothing since 20" in shown and store["health"]["what"] in shown
        engine.call(engine.cache.storage.detach)
        assert engine.ask("GET", "/status")["state"] == "ready", "the operator wants no storage"


@pytest.mark.long
def test_a_full_store_is_a_problem_while_the_cache_works(tmp_path: Path) -> None:
    options = {"path": tmp_path / "store", "free_space_floor": "900TiB"}
    with RunningEngine(file_config(tmp_path, storage={"type": "file", "options": options})) as engine:
        numbers = itertools.count(1)

        def serve() -> None:
            first = 4 * next(numbers)
            engine.serve(str(first), prompt(*range(first, first + 4)))

        wait_for(lambda: engine.ask("GET", "/status")["state"] == "degraded", serve, timeout_s=CONFIRM_S + 45.0,
                 pause_s=0.1)
        (store,) = engine.ask("GET", "/status")["stores"]
        assert (store["health"]["cause"], store["write"]["state"]) == ("rejected", "closed")
        assert "free_space_floor is 900.0 TiB" in store["health"]["what"]


def test_status_shows_tiers_stores_and_the_namespace(served: RunningEngine) -> None:
    served.serve("b", PROMPT)
    wait_for(lambda: pages_shown(served) == 4)
    found = served.ask("GET", "/status")
    assert found["kind"] == "embedded" and found["attached"]
    assert [(tier["name"], tier["pages"]) for tier in found["tiers"]] == [("device", 4), ("host", 4)]
    (store,) = found["stores"]
    assert (store["name"], store["read"]["state"]) == ("file", "closed")
    (space,) = found["namespaces"]
    assert space["namespace"] == DIGEST and space["pool_hits"] == 4


def test_the_status_does_not_need_the_scheduler(served: RunningEngine) -> None:
    served.pause()
    wait_for(lambda: pages_shown(served) == 4)


def test_a_lookup_says_where_each_page_is(served: RunningEngine) -> None:
    unknown = "0" * 64
    assert served.places(keys=[KEYS[3], unknown]) == [["device", "host", "file"], []]
    assert served.places(tokens=TOKENS) == [["device", "file"]] * 4  # a lookup by tokens names the fastest tier only
    assert served.places(keys=KEYS, namespace="ff" if DIGEST[0] != "f" else "00") == [[]] * 4
    served.call(lambda: served.cache.evict(4))
    assert served.places(tokens=TOKENS) == [["host", "file"]] * 4
    assert served.places(keys=KEYS[:1]) == [["host", "file"]]
    served.call(served.cache.clear)
    assert served.places(keys=KEYS) == [["file"]] * 4


def test_a_lookup_by_the_first_digits_finds_pages_in_memory_and_in_stores(served: RunningEngine) -> None:
    (page,) = served.ask("POST", "/lookup", {"prefix": KEYS[2][:8]})["pages"]
    assert page == {"key": KEYS[2], "namespace": DIGEST, "places": ["device", "host", "file"]}
    served.call(served.cache.clear)
    assert served.places(prefix=KEYS[2][:8]) == [["file"]]
    assert served.places(prefix="00000000") == []


def test_a_lookup_does_not_refresh_recency(served: RunningEngine) -> None:
    used = served.call(lambda: [node.last_access for node in served.cache.tree.nodes()])
    served.places(keys=KEYS)
    served.places(tokens=TOKENS)
    assert served.call(lambda: [node.last_access for node in served.cache.tree.nodes()]) == used


def test_a_lookup_names_the_stores_that_did_not_answer(served: RunningEngine) -> None:
    served.ask("PUT", "/breakers", {"store": "file", "mode": "off"}, 204)
    found = served.ask("POST", "/lookup", {"keys": KEYS[:1]})
    assert found["unknown"] == ["file"] and found["pages"][0]["places"] == ["device", "host"]


# Memory


def test_a_pinned_prefix_is_not_evicted_and_another_one_is(served: RunningEngine) -> None:
    served.serve("b", prompt(5, 6))
    served.settle()
    pin = served.ask("POST", "/pins", {"tokens": TOKENS, "ttl_s": 60}, 201)
    assert (pin["pages"], pin["asked_pages"]) == (4, 4) and 50 < pin["expires_in_s"] <= 60
    served.call(lambda: served.cache.evict(100))
    served.settle()
    served.call(lambda: served.cache.host.free(served.cache.tree.evict_host(100)))
    assert served.places(tokens=TOKENS) == [["host", "file"]] * 4
    assert served.places(tokens={"ids": [5] * 4 + [6] * 4}) == [["file"]] * 2
    assert [found["id"] for found in served.ask("GET", "/pins")] == [pin["id"]]
    served.ask("DELETE", f"/pins/{pin['id']}", code=204)
    assert served.ask("GET", "/pins") == []
    served.call(lambda: served.cache.host.free(served.cache.tree.evict_host(100)))
    assert served.places(tokens=TOKENS) == [["file"]] * 4


def test_pins_over_their_share_are_rejected(tmp_path: Path) -> None:
    with RunningEngine(file_config(tmp_path, pin_host_share=0)) as engine:
        engine.serve("a", PROMPT)
        answer = engine.ask("POST", "/pins", {"tokens": TOKENS}, 409)
        assert answer["error"] == "too_many" and "pin_host_share" in answer["detail"]


def test_tokens_with_another_cache_salt_are_another_prefix(served: RunningEngine) -> None:
    assert served.ask("POST", "/pins", {"tokens": TOKENS | {"cache_salt": "other"}}, 201)["pages"] == 0
    served.serve("b", prompt(1, 2, salt="other"))
    assert served.ask("POST", "/pins", {"tokens": TOKENS | {"cache_salt": "other"}}, 201)["pages"] == 2


def test_clearing_the_pool_does_not_clear_the_store(served: RunningEngine, tmp_path: Path) -> None:
    other = "0" if DIGEST[0] != "0" else "1"
    assert served.job("/clear", {"where": "pool", "namespace": other})["progress"]["removed"] == 0
    assert served.places(tokens=TOKENS)[0] == ["device", "file"]
    assert served.job("/clear", {"where": "pool", "namespace": DIGEST[:8]})["progress"]["removed"] == 8  # on two tiers
    assert served.places(tokens=TOKENS)[0] == ["file"] and stored_pages(tmp_path) == 4


def test_a_cleared_store_is_filled_again(served: RunningEngine, tmp_path: Path) -> None:
    assert served.job("/clear", {"where": "store", "store": "file"})["progress"]["removed"] == 4
    assert stored_pages(tmp_path) == 0
    assert served.serve("b", PROMPT) == 16
    served.settle()
    assert stored_pages(tmp_path) == 4


def test_clearing_all_covers_every_store(levels: RunningEngine, tmp_path: Path) -> None:
    levels.serve("a", PROMPT)
    wait_for(lambda: levels.places(tokens=TOKENS) == [["device", "ram", "disk"]] * 4)
    job = levels.job("/clear", {"where": "all", "namespace": DIGEST[:6]})
    assert job["state"] == "done" and job["progress"]["removed"] == 16
    assert levels.places(tokens=TOKENS) == [[]] * 4 and stored_pages(tmp_path) == 0


# Stores


def test_a_store_is_detached_and_attached_while_the_engine_runs(served: RunningEngine) -> None:
    served.ask("POST", "/detach", {}, 204)
    assert not served.ask("GET", "/status")["attached"]
    served.call(served.cache.clear)
    assert served.serve("b", PROMPT) == 0
    served.ask("POST", "/attach", {}, 204)
    wait_for(lambda: len(served.ask("GET", "/status")["stores"]) == 1)
    served.call(served.cache.clear)
    wait_for(lambda: served.call(lambda: served.cache.controller.gate.storage is not None))
    assert served.serve("c", PROMPT) == 16


def overrides(engine: RunningEngine) -> list[tuple[str, str, str]]:
    """Return the overrides of the breakers of each store."""
    found = engine.ask("GET", "/status")["stores"]
    return [(one["name"], one["read"]["override"], one["write"]["override"]) for one in found]


def test_a_forced_breaker_stays_forced_when_its_store_is_opened_again(levels: RunningEngine) -> None:
    levels.ask("PUT", "/breakers", {"store": "disk", "direction": "write", "mode": "off"}, 204)
    assert overrides(levels) == [("ram", "auto", "auto"), ("disk", "auto", "off")]
    levels.serve("a", PROMPT)
    levels.settle()
    assert levels.places(tokens=TOKENS) == [["device", "ram"]] * 4
    levels.ask("POST", "/attach", {}, 204)
    wait_for(lambda: overrides(levels) == [("ram", "auto", "auto"), ("disk", "auto", "off")])
    levels.ask("PUT", "/breakers", {"mode": "off"}, 204)
    assert overrides(levels) == [("ram", "off", "off"), ("disk", "off", "off")]
    levels.ask("PUT", "/breakers", {"store": "ram", "mode": "auto"}, 204)
    assert overrides(levels) == [("ram", "auto", "auto"), ("disk", "off", "off")]
    levels.ask("PUT", "/breakers", {"mode": "auto"}, 204)
    assert overrides(levels) == [("ram", "auto", "auto"), ("disk", "auto", "auto")]
    assert levels.ask("GET", "/status")["overrides"] == {}


def damage_one(folder: Path) -> None:
    """Flip a byte in the payload of one stored page."""
    page = max((folder / "store").rglob("*"), key=lambda path: path.stat().st_size if KEYS[1] in path.name else 0)
    data = bytearray(page.read_bytes())
    data[HEADER_BYTES] ^= 1
    page.write_bytes(data)


def test_a_scrub_finds_damage_and_removes_it_on_demand(served: RunningEngine, tmp_path: Path) -> None:
    assert served.job("/scrub", {})["progress"]["damaged"] == {}
    damage_one(tmp_path)
    for remove in (False, True):
        progress = served.job("/scrub", {"store": "file", "remove": remove})["progress"]
        assert (progress["pages"], sum(progress["damaged"].values()), progress["removed"]) == (4, 1, int(remove))
        assert [(page["store"], page["namespace"], page["key"]) for page in progress["findings"]] == [
            ("file", DIGEST, KEYS[1])
        ]
    assert served.job("/scrub", {})["progress"]["pages"] == 3


def test_a_job_is_cancelled_between_two_pages_and_jobs_are_bounded(served: RunningEngine) -> None:
    slow = {"rate_bytes_per_s": 2048}
    started = [served.ask("POST", "/scrub", slow, 202)["id"] for _ in range(UNFINISHED_MAX)]
    assert served.ask("POST", "/scrub", slow, 503)["error"] == "busy"
    for job in started:
        served.ask("DELETE", f"/jobs/{job}")
    wait_for(lambda: all(job["state"] == "cancelled" for job in served.ask("GET", "/jobs")))
    assert max(job["progress"]["pages"] for job in served.ask("GET", "/jobs")) < 4
    assert served.job("/scrub", {})["state"] == "done"


# Rejected requests


def test_with_a_stopped_scheduler_a_request_fails_and_is_not_run_later(
    served: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SCHEDULER_TIMEOUT_S", 0.1)
    served.pause()
    assert served.ask("POST", "/detach", {}, 503)["error"] == "scheduler_stopped"
    served.resume()
    served.call(lambda: None)
    assert served.ask("GET", "/status")["attached"]


def test_with_several_ranks_changes_that_all_ranks_must_make_are_rejected(
    served: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(served.cache.controller), "has_ranks", property(lambda _: True))
    for target, body in (("/detach", {}), ("/attach", {}), ("/pins", {"tokens": TOKENS})):
        assert "ranks" in served.ask("POST", target, body, 409)["detail"]
    assert served.job("/clear", {"where": "pool"})["state"] == "failed"
    served.ask("PUT", "/breakers", {"mode": "off"}, 204)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine without requests, shared by the tests of rejected calls."""
    with RunningEngine(file_config(tmp_path_factory.mktemp("idle"))) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "target", "body", "code", "says"),
    [
        ("POST", "/lookup", {}, 422, "pass one of"),
        ("POST", "/lookup", {"keys": KEYS, "prefix": KEYS[0]}, 422, "pass one of"),
        ("POST", "/lookup", {"keys": ["secret-key"]}, 422, "keys.0"),
        ("POST", "/lookup", {"tokens": {"ids": [-5]}}, 422, "tokens.ids.0"),
        ("POST", "/lookup", "{", 422, "JSON"),
        ("POST", "/pins", {"keys": KEYS}, 409, "finds pages by tokens"),
        ("POST", "/pins", {"tokens": {"ids": IDS}, "ttl_s": 0}, 422, "ttl_s"),
        ("POST", "/clear", {"where": "store"}, 422, "pass `store`"),
        ("POST", "/clear", {"where": "store", "store": "tape"}, 404, "the stores are: file"),
        ("POST", "/clear", {"where": "all", "namespaces": "ab"}, 422, "namespaces"),
        ("POST", "/scrub", {"rate_bytes_per_s": 0}, 422, "rate_bytes_per_s"),
        ("PUT", "/breakers", {"store": "tape", "mode": "off"}, 404, "the stores are: file"),
        ("PUT", "/quotas", {"namespace": "ab", "quota_bytes": 1}, 409, "pool of a daemon"),
        ("PUT", "/log_level", {"level": "chatty"}, 422, "level"),
        ("DELETE", "/pins/none", None, 404, "list the pins"),
        ("GET", "/jobs/none", None, 404, "list the jobs"),
    ],
)
def test_a_rejection_says_what_to_do_and_does_not_quote_keys_or_tokens(
    idle: RunningEngine, method: str, target: str, body: object, code: int, says: str
) -> None:
    answer = idle.ask(method, target, body, code)
    assert set(answer) == {"error", "detail"} and says in answer["detail"]
    assert "secret-key" not in answer["detail"] and "-5" not in answer["detail"]


# Access rights and the log


def test_each_change_is_logged_in_one_line_without_prompt_or_salt(
    served: RunningEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hicache.admin")
    served.ask("POST", "/pins", {"tokens": {"ids": IDS, "cache_salt": "tenant-7"}, "ttl_s": 60}, 201)
    served.ask("PUT", "/breakers", {"mode": "off", "store": "tape"}, 404)
    served.ask("GET", "/status")
    served.ask("POST", "/lookup", {"keys": KEYS})
    lines = messages_of(caplog, "admin.router")
    who = f"admin: uid {os.geteuid()}"
    assert lines == [
        f"{who}: pin a chain for 60 s: ok",
        f"{who}: breaker of store 'tape', both directions: off: refused (unknown_store)",
    ]
    assert "tenant-7" not in caplog.text and KEYS[0] not in caplog.text


def test_with_an_admin_token_every_request_needs_the_current_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hicache.admin")
    mounted = MountedSecret(tmp_path / "secret", {"token": "open-sesame\n"})
    socket = tmp_path / "own" / "engine.sock"
    with RunningEngine(file_config(tmp_path, admin={"socket": socket, "token_file": mounted["token"]})):
        for token, code in ((None, 403), ("close-sesame", 403), ("open-sesame", 204)):
            assert ask(socket, "PUT", "/log_level", {"level": "info"}, token)[0] == code
        assert ask(socket, "PUT", "/log_level", b"{broken")[0] == 403  # before the body is read
        mounted.replace({"token": "new-sesame"})
        assert [ask(socket, "GET", "/status", token=token)[0] for token in ("open-sesame", "new-sesame")] == [403, 200]
    assert "admin: token: log level info: ok" in caplog.text and "sesame" not in caplog.text


# Start and end


def test_without_a_socket_or_without_a_prefix_cache_there_is_no_admin_surface(tmp_path: Path) -> None:
    config = file_config(tmp_path, storage=None, admin={})
    with create_cache(config, NAMESPACE) as cache:
        assert serve_configured(config, cache, NAMESPACE) is None
    plain = file_config(tmp_path, prefix_cache=False)
    with create_cache(plain, NAMESPACE) as cache:
        assert serve_configured(plain, cache, NAMESPACE) is None


def test_a_cache_without_l1_has_an_admin_surface_too(tmp_path: Path) -> None:
    config = file_config(tmp_path)
    with create_host_cache(config, NAMESPACE) as cache, ThreadPoolExecutor() as pool:
        server = serve_configured(config, cache, NAMESPACE)
        assert server is not None
        with server:
            assert [tier["name"] for tier in ask(server.path, "GET", "/status")[1]["tiers"]] == ["host"]
            pin = pool.submit(ask, server.path, "POST", "/pins", {"tokens": TOKENS})
            wait_for(pin.done, cache.poll)
            assert (pin.result()[0], pin.result()[1]["pages"]) == (201, 0)
            lookup = pool.submit(ask, server.path, "POST", "/lookup", {"tokens": TOKENS})
            wait_for(lookup.done, cache.poll)
            assert [page["places"] for page in lookup.result()[1]["pages"]] == [[]] * 4


def test_closing_cancels_jobs_and_removes_the_socket(tmp_path: Path) -> None:
    with RunningEngine(file_config(tmp_path)) as engine:
        engine.serve("a", PROMPT)
        engine.settle()
        engine.ask("POST", "/scrub", {"rate_bytes_per_s": 4096}, 202)
        assert engine.admin is not None and engine.admin.path.exists()
    assert not engine.admin.path.exists()
