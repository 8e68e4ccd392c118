"""Warm-ups of a cache inside a running engine, over its admin socket and with `hicache ctl warm`."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.admin import serve_configured, work
from hicache.admin.embedded import AdminServer
from hicache.cache import HostCache, create_host_cache
from hicache.cache.mailbox import Mailbox
from hicache.controller import ReadOperation
from hicache.keys import RadixKey
from tests.admin.ctl import Ctl
from tests.admin.running import DIGEST, IDS, KEYS, PROMPT, RunningEngine, ask, file_config
from tests.cache.world import NAMESPACE, prompt
from tests.waiting import wait_for

TOKENS = {"ids": IDS}
OTHER = {"ids": [9] * 8}
FRAME_BYTES = 4096


@pytest.fixture
def cold(engine: RunningEngine) -> RunningEngine:
    """An engine with PROMPT, and two pages of token 9, in its store and not in memory."""
    engine.serve("a", PROMPT)
    engine.serve("b", prompt(9, 9))
    engine.settle()
    engine.call(engine.cache.clear)
    return engine


def read_pages(engine: RunningEngine) -> int:
    """Return the number of pages that the cache has read from its store."""
    backend = engine.cache.controller.backend
    assert backend is not None
    return sum(backend.statistics().gets.values())


def test_the_first_request_after_a_warm_up_hits_l2(cold: RunningEngine) -> None:
    before = read_pages(cold)
    job = cold.job("/warm", {"prompts": [TOKENS]})
    progress = job["progress"]
    assert (job["kind"], job["state"], job["error"]) == ("warm", "done", "")
    assert (progress["pages"], progress["total"], progress["bytes"]) == (4, 4, 4 * FRAME_BYTES)
    assert progress["skipped"] == [] and read_pages(cold) == before + 4
    assert cold.places(tokens=TOKENS) == [["host", "file"]] * 4
    assert cold.serve("c", prompt(1, 2, 3, 4, 5)) == 16
    assert cold.cache.statistics().hit_tokens["storage"] == 0 and read_pages(cold) == before + 4


def test_pages_that_prompts_share_count_once_and_missing_ones_are_named(cold: RunningEngine) -> None:
    prompts = [{"ids": IDS[:8]}, TOKENS, {"ids": [*IDS, 7, 7, 7, 7]}, OTHER]
    progress = cold.job("/warm", {"prompts": prompts})["progress"]
    assert (progress["pages"], progress["total"], progress["bytes"]) == (6, 7, 6 * FRAME_BYTES)
    assert progress["skipped"] == ["the rest of 1 chain is not in storage, or cannot be read now"]
    salted = cold.job("/warm", {"prompts": [TOKENS | {"cache_salt": "another tenant"}]})["progress"]
    assert (salted["pages"], salted["total"], salted["bytes"]) == (0, 4, 0)


def test_a_dry_run_reads_nothing_and_has_the_result_of_a_warm_up_with_enough_memory(cold: RunningEngine) -> None:
    body = {"prompts": [TOKENS, {"ids": IDS[:8] + [5] * 4}, OTHER]}
    before = read_pages(cold)
    dry = cold.job("/warm", body | {"dry_run": True})
    assert read_pages(cold) == before and cold.places(tokens=TOKENS) == [["file"]] * 4
    assert "dry run" in dry["what"]
    assert dry["progress"] == cold.job("/warm", body)["progress"]
    assert (dry["progress"]["pages"], dry["progress"]["total"], dry["progress"]["bytes"]) == (6, 7, 6 * FRAME_BYTES)


def test_a_warm_up_stops_when_memory_is_full_and_evicts_nothing(tmp_path: Path) -> None:
    with RunningEngine(file_config(tmp_path, host={"tokens": 24}, device={"tokens": 64})) as engine:
        engine.serve("a", PROMPT)
        engine.settle()
        engine.call(engine.cache.clear)
        engine.serve("b", prompt(5, 6, 7))
        engine.settle()
        dry = engine.job("/warm", {"prompts": [TOKENS, OTHER], "dry_run": True})["progress"]
        assert (dry["pages"], dry["total"], dry["bytes"]) == (4, 6, 4 * FRAME_BYTES)
        progress = engine.job("/warm", {"prompts": [TOKENS, OTHER]})["progress"]
        assert (progress["pages"], progress["total"], progress["bytes"]) == (3, 6, 3 * FRAME_BYTES)
        assert progress["skipped"] == ["memory is full, and a warm-up evicts nothing"]
        # The chains behind it that are in memory anyway are counted.
        there = {"ids": [5] * 4 + [6] * 4 + [7] * 4}
        progress = engine.job("/warm", {"prompts": [TOKENS, there]})["progress"]
        assert (progress["pages"], progress["total"], progress["bytes"]) == (6, 7, 0)
        assert engine.cache.statistics().evicted_pages.get("host", 0) == 0
        assert engine.places(tokens=there) == [["device", "file"]] * 3
        assert engine.places(tokens=TOKENS) == [["host", "file"]] * 3 + [["file"]]


def test_a_long_prompt_arrives_in_pieces(cold: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "PIECE_BYTES", 3 * FRAME_BYTES)
    progress = cold.job("/warm", {"prompts": [TOKENS]})["progress"]
    assert (progress["pages"], progress["bytes"]) == (4, 4 * FRAME_BYTES)


def test_a_cancelled_warm_up_keeps_the_pages_that_have_arrived(cold: RunningEngine) -> None:
    job = cold.ask("POST", "/warm", {"prompts": [TOKENS], "rate_bytes_per_s": FRAME_BYTES}, 202)
    wait_for(lambda: cold.ask("GET", f"/jobs/{job['id']}")["progress"]["pages"] > 0)
    cold.ask("DELETE", f"/jobs/{job['id']}")
    wait_for(lambda: cold.ask("GET", f"/jobs/{job['id']}")["state"] == "cancelled")
    pages = cold.ask("GET", f"/jobs/{job['id']}")["progress"]["pages"]
    assert 1 <= pages < 4
    cold.call(cold.cache.check)
    assert cold.places(tokens=TOKENS) == [["host", "file"]] * pages + [["file"]] * (4 - pages)
    assert cold.job("/warm", {"prompts": [TOKENS]})["progress"]["pages"] == 4


@pytest.mark.parametrize("closes", [False, True])
def test_pages_of_a_warm_up_are_released_however_late_the_scheduler_is(
    cold: RunningEngine, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    asked: list[str] = []
    controller, ask_scheduler = cold.cache.controller, Mailbox.ask
    read_apart = controller.read_apart

    def read_while_it_stops(read: ReadOperation) -> None:
        monkeypatch.setattr("hicache.admin.embedded.SCHEDULER_TIMEOUT_S", 0.01)
        cold.pause()
        asked.clear()
        read_apart(read)

    def counted(mailbox: Mailbox, *request: Any) -> Any:
        asked.append("scheduler")
        return ask_scheduler(mailbox, *request)

    monkeypatch.setattr(controller, "read_apart", read_while_it_stops)
    monkeypatch.setattr(Mailbox, "ask", counted)
    started = cold.ask("POST", "/warm", {"prompts": [TOKENS]}, 202)
    wait_for(lambda: len(asked) > 2)
    assert cold.cache.warming_pages == 4
    if closes:
        cold.cache.mailbox.close()
    else:
        cold.resume()
    wait_for(lambda: cold.ask("GET", f"/jobs/{started['id']}")["state"] in ("done", "failed"))
    job = cold.ask("GET", f"/jobs/{started['id']}")
    cold.resume()
    assert (job["state"], job["progress"]["pages"]) == (("failed", 0) if closes else ("done", 4))
    assert cold.cache.warming_pages == (4 if closes else 0)  # a closed cache keeps what it has
    cold.call(cold.cache.check)


def test_with_a_stopped_scheduler_a_warm_up_fails(cold: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.admin.embedded.SCHEDULER_TIMEOUT_S", 0.1)
    cold.pause()
    job = cold.job("/warm", {"prompts": [TOKENS]})
    assert job["state"] == "failed" and "did not serve this" in job["error"]
    cold.resume()
    monkeypatch.undo()
    assert cold.job("/warm", {"prompts": [TOKENS]})["progress"]["pages"] == 4


# Rejected requests


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({}, 422, "pass one of"),
        ({"prompts": [TOKENS], "top_bytes": 1}, 422, "pass one of"),
        ({"keys": KEYS}, 409, "--tokens or --prompts"),
        ({"top_bytes": 1 << 20}, 409, "--tokens or --prompts"),
        ({"prompts": [{"ids": [-5]}]}, 422, "prompts.0.ids.0"),
        ({"prompts": [TOKENS], "namespace": "ff" if DIGEST[0] != "f" else "00"}, 404, "list the namespaces"),
    ],
)
def test_a_rejected_warm_up_says_what_to_do(engine: RunningEngine, body: object, code: int, says: str) -> None:
    answer = engine.ask("POST", "/warm", body, code)
    assert says in answer["detail"] and "-5" not in answer["detail"]


def test_without_storage_there_is_nothing_to_warm_from(engine: RunningEngine) -> None:
    engine.ask("POST", "/detach", {}, 204)
    assert "no storage is attached" in engine.ask("POST", "/warm", {"prompts": [TOKENS]}, 409)["detail"]


def test_with_several_ranks_a_warm_up_is_rejected(engine: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine.cache.controller), "has_ranks", property(lambda _: True))
    assert "ranks" in engine.ask("POST", "/warm", {"prompts": [TOKENS]}, 409)["detail"]


def test_logs_and_jobs_do_not_contain_prompts_or_salts(cold: RunningEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="hicache")
    body = {"prompts": [{"ids": [7654321] * 8, "cache_salt": "tenant-7", "extra_key": "adapter-7"}]}
    job = cold.job("/warm", body)
    assert "admin: uid" in caplog.text and "warm-up with 1 prompt: ok" in caplog.text
    for secret in ("tenant-7", "adapter-7", "7654321"):
        assert secret not in caplog.text and secret not in json.dumps(job)


# Engines with page keys


class HostEngine:
    """An engine that makes page keys: a HostCache that a thread polls, with an admin surface."""

    def __init__(self, folder: Path, **entries: Any) -> None:
        config = file_config(folder, **entries)
        namespace = replace(NAMESPACE, key_hash="sha256")
        self.digest = namespace.digest.hex()
        self.cache: HostCache = create_host_cache(config, namespace)
        self._lock, self._is_closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        server = serve_configured(config, self.cache, namespace)
        assert isinstance(server, AdminServer)
        self.admin = server

    def _poll(self) -> None:
        while not self._is_closing.wait(0.001):
            with self._called():
                self.cache.poll()

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        with self._lock:
            self.cache.take_over()
            yield

    def write(self, rid: str, hashes: list[bytes]) -> None:
        """Compute and store a chain."""
        with self._called():
            write = self.cache.begin_write(rid, RadixKey.of_hashes(hashes))
            assert write is not None
            self.cache.end_write(write, complete=True)
            self.cache.abort(rid)
        wait_for(lambda: self.cache.controller.idle)

    def job(self, body: object) -> Any:
        """Run a warm-up. Return its description."""
        code, started = ask(self.admin.path, "POST", "/warm", body)
        assert code == 202, started
        wait_for(lambda: ask(self.admin.path, "GET", f"/jobs/{started['id']}")[1]["state"] in ("done", "failed"))
        return ask(self.admin.path, "GET", f"/jobs/{started['id']}")[1]

    def hit(self, hashes: list[bytes]) -> int:
        """Return how many pages of a chain a request finds on L2."""
        with self._called():
            pages = self.cache.lookup("hit", RadixKey.of_hashes(hashes)).pages
            self.cache.abort("hit")
            return pages

    def close(self) -> None:
        """End the threads and close the cache."""
        self.admin.close()
        self._is_closing.set()
        self._thread.join()
        self.cache.take_over()
        self.cache.check()
        assert self.cache.close()


OLD, NEW = ([bytes([start + number]) * 32 for number in range(4)] for start in (1, 101))


@pytest.fixture
def host_engine(tmp_path: Path) -> Iterator[HostEngine]:
    """An engine with two chains in its store, and none in memory."""
    with contextlib.closing(HostEngine(tmp_path)) as filler:
        filler.write("old", OLD)
        filler.write("new", NEW)
    with contextlib.closing(HostEngine(tmp_path)) as engine:
        yield engine


def test_a_cache_of_page_keys_is_warmed_by_a_chain_of_keys(host_engine: HostEngine) -> None:
    job = host_engine.job({"keys": [key.hex() for key in OLD], "namespace": host_engine.digest[:8]})
    assert (job["progress"]["pages"], job["progress"]["bytes"]) == (4, 4 * FRAME_BYTES)
    assert (host_engine.hit(OLD), host_engine.hit(NEW)) == (4, 0)


def test_a_cache_of_page_keys_is_warmed_by_the_hottest_chains(host_engine: HostEngine) -> None:
    dry = host_engine.job({"top_bytes": 6 * FRAME_BYTES, "dry_run": True})["progress"]
    assert (host_engine.hit(OLD), host_engine.hit(NEW)) == (0, 0)
    progress = host_engine.job({"top_bytes": 6 * FRAME_BYTES})["progress"]
    assert progress == dry
    assert (progress["store"], progress["pages"], progress["total"]) == ("file", 6, 6)
    assert (host_engine.hit(OLD), host_engine.hit(NEW)) == (2, 4)


def test_a_cache_of_page_keys_pins_a_chain_of_keys(host_engine: HostEngine) -> None:
    chain = [key.hex() for key in OLD]
    assert host_engine.job({"keys": chain})["progress"]["pages"] == 4
    code, pin = ask(host_engine.admin.path, "POST", "/pins", {"keys": chain})
    assert (code, pin["pages"], host_engine.cache.statistics().pinned_pages) == (201, 4, 4)
    assert ask(host_engine.admin.path, "DELETE", f"/pins/{pin['id']}")[0] == 204


def test_a_cache_of_page_keys_refuses_tokens(host_engine: HostEngine) -> None:
    code, answer = ask(host_engine.admin.path, "POST", "/warm", {"prompts": [TOKENS]})
    assert code == 409 and "pass page keys" in answer["detail"]


def test_stores_that_cannot_be_listed_are_skipped_with_a_reason(tmp_path: Path) -> None:
    parts = [
        {"name": "ram", "type": "memory", "options": {}},
        {"name": "disk", "type": "file", "options": {"path": tmp_path / "store", "free_space_floor": 0}},
    ]
    storage = {"type": "levels", "options": {"levels": parts}}
    with contextlib.closing(HostEngine(tmp_path, storage=storage)) as engine:
        engine.write("old", OLD)
    with contextlib.closing(HostEngine(tmp_path, storage=storage)) as engine:
        progress = engine.job({"top_bytes": 1 << 20})["progress"]
        assert (progress["pages"], progress["skipped"]) == (4, ["ram: cannot be listed"])


# hicache ctl


@pytest.mark.long
def test_ctl_warms_prompts_from_a_file_and_from_standard_input(cold: RunningEngine, tmp_path: Path) -> None:
    ctl = Ctl(("--socket", str(cold.config.admin.socket)))
    tokens, prompts = tmp_path / "tokens.json", tmp_path / "prompts.jsonl"
    tokens.write_text(json.dumps(IDS))
    prompts.write_text(f"{json.dumps(IDS)}\n\n{json.dumps(OTHER)}\n")
    lines = ctl("warm", "--prompts", str(prompts), "--dry-run").out.splitlines()
    assert lines[0].startswith("dry run of a warm-up with 2 prompts: done after")
    assert lines[1:] == ["  in memory 6 of 6 pages", "  read      24.0 KiB"]
    assert cold.places(tokens=TOKENS) == [["file"]] * 4
    lines = ctl.quick("warm", "--tokens", str(tokens)).out.splitlines()
    assert lines[0].startswith("warm-up with 1 prompt: done after") and lines[1] == "  in memory 4 of 4 pages"
    with prompts.open() as stdin:
        job = ctl("--json", "warm", "--prompts", "-", "--rate", "1GiB", stdin=stdin).json
    assert (job["progress"]["pages"], job["progress"]["bytes"]) == (6, 2 * FRAME_BYTES)
    # A busy machine may end the job before the command prints its number.
    background = ctl.quick("warm", "--background", "--tokens", str(tokens)).out
    assert background.startswith(("job ", "warm-up with 1 prompt: done after"))
    tokens.write_text("[7, 7, 7, 7]")
    ended = ctl.quick("warm", "--tokens", str(tokens), code=1)
    assert "  in memory 0 of 1 page\n" in ended.out and "  skipped   the rest of 1 chain is not in storage" in ended.out


@pytest.mark.long
def test_ctl_says_what_is_wrong_with_a_warm_up(cold: RunningEngine, tmp_path: Path) -> None:
    ctl = Ctl(("--socket", str(cold.config.admin.socket)))
    assert "pass one of KEYS" in ctl.quick("warm", code=2).err
    assert "pass one of KEYS" in ctl.quick("warm", KEYS[0], "--top", "1GiB", code=2).err
    assert "--tokens or --prompts" in ctl.quick("warm", *KEYS, code=2).err
    assert "not a page key" in ctl.quick("warm", "abcd", code=2).err
    prompts = tmp_path / "prompts.jsonl"
    for text, says in (("[1, 2]\nsecret", "line 2: is not JSON"), ("\n", "is empty"), ('"secret"', "ids")):
        prompts.write_text(text)
        err = ctl.quick("warm", "--prompts", str(prompts), code=2).err
        assert says in err and "secret" not in err
