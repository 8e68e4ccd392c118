"""Hints without a request: `POST /v1/hints` of an engine and of a daemon, and `hicache ctl hint`."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.daemon.pool import PINNED_SHARE_MAX
from hicache.hints import ACTIONS_MAX
from tests.admin.ctl import Ctl
from tests.admin.daemons import Daemon, keys_of
from tests.admin.running import IDS, KEYS, PROMPT, RunningEngine, file_config
from tests.admin.test_daemon import PAGE_POOL_BYTES, filled
from tests.cache.hinting import action
from tests.daemon.daemons import Client
from tests.log_records import messages_of
from tests.waiting import wait_for

pytestmark = pytest.mark.long

SALT, POOL_BYTES = "tenant-7", 1 << 20


def post(path: Path, body: object, code: int = 200) -> Any:
    """Send hints to a socket. Return the document of the answer."""
    with contextlib.closing(Client(path)) as client:
        status, answer = client.call("POST", "/v1/hints", body)
    assert status == code, answer
    return answer


def send(path: Path, kind: str, **payload: Any) -> Any:
    """Send one action and return its outcome."""
    (found,) = post(path, {"actions": [action(kind, **payload)]})
    assert (found["action_id"], found["action_type"]) == (f"id of {kind}", kind)
    return found


# An engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine that has served PROMPT in session `s`, shared by tests that leave no pins."""
    with RunningEngine(file_config(tmp_path_factory.mktemp("hinted"))) as running:
        running.call(lambda: running.cache.hint({"actions": [action("session.turn", session_id="s")]}, "a"))
        running.serve("a", PROMPT)
        running.settle()
        yield running


@pytest.fixture
def path(engine: RunningEngine) -> Path:
    assert engine.config.admin.socket is not None
    return Path(engine.config.admin.socket)


def test_an_engine_carries_out_the_actions_in_order(engine: RunningEngine, path: Path) -> None:
    unknown = {**action("kv.share"), "action_version": "7"}
    found = post(path, {"protocol_version": "0.1", "message_id": "m", "actions": [
        action("kv.pin", session_id="s", ttl_s=5), action("kv.retain", tokens=IDS[:8], value=0.5), unknown,
        action("session.turn", tokens=[5] * 8), action("kv.release", session_id="s"),
    ]})
    assert [(one["status"], one["pages"], one["ttl_s"]) for one in found] == [
        ("accepted", 4, 5), ("accepted", 2, 60), ("rejected", 0, None), ("missing", 0, None), ("clipped", 2, None)]
    assert "kv.pin" in found[2]["detail"]
    assert engine.call(lambda: engine.cache.tree.pinned_pages) == 0
    assert post(path, {"actions": [action("kv.release", tokens=IDS)]})[0]["status"] == "accepted"
    assert engine.cache.statistics().hints["kv.retain", "accepted"] == 1


def test_an_empty_envelope_has_no_outcomes(path: Path) -> None:
    assert post(path, {"actions": []}) == []


@pytest.mark.parametrize(("body", "says"), [
    ("{", "JSON"), ([], "valid dictionary"), ({"actions": 5}, "actions"), ({"actions": [{}]}, "actions.0.action_id"),
    ({"actions": [action("kv.pin")] * (ACTIONS_MAX + 1)}, "actions"), ({"message_id": "m" * 300}, "message_id"),
    ({"actions": [{**action("kv.pin"), "payload": [SALT]}]}, "actions.0.payload"),
])
def test_a_body_that_is_not_an_envelope_is_refused_as_those_of_other_calls(path: Path, body: object, says: str) -> None:
    answer = post(path, body, 422)
    assert set(answer) == {"error", "detail"} and says in answer["detail"] and SALT not in answer["detail"]


def test_a_wrong_payload_is_an_outcome(path: Path) -> None:
    found = send(path, "kv.pin", tokens=["x"], cache_salt=SALT, ttl_s=0)
    assert found["status"] == "rejected" and "ttl_s" in found["detail"] and "tokens.0" in found["detail"]


def test_hints_are_logged_without_prompts_and_salts(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hicache.admin")
    send(path, "session.turn", tokens=IDS, cache_salt=SALT, session_id="s-of-a-user")
    (line,) = messages_of(caplog, "admin.router")
    assert line.endswith("hints session.turn: ok")
    assert SALT not in caplog.text and str(IDS[:4]) not in caplog.text and "s-of-a-user" not in caplog.text


def test_with_several_ranks_hints_are_refused(
    engine: RunningEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.cache.controller), "has_ranks", property(lambda _: True))
    assert "ranks" in post(path, {"actions": [action("kv.pin", session_id="s")]}, 409)["detail"]


def test_with_a_stopped_scheduler_hints_are_refused_and_not_carried_out_later(
    engine: RunningEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.admin.embedded.SCHEDULER_TIMEOUT_S", 0.1)
    engine.pause()
    try:
        assert post(path, {"actions": [action("kv.pin", session_id="s")]}, 503)["error"] == "scheduler_stopped"
    finally:
        engine.resume()
    assert engine.call(lambda: engine.cache.tree.pinned_pages) == 0


def test_an_admin_token_protects_hints(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("for-operators-" + "1" * 20)
    secret.chmod(0o600)
    config = file_config(tmp_path, admin={"socket": tmp_path / "sockets" / "s.sock", "token_file": secret})
    with RunningEngine(config):
        assert post(tmp_path / "sockets" / "s.sock", {"actions": []}, 403)["error"]


# hicache ctl hint


@pytest.fixture
def ctl(path: Path) -> Ctl:
    return Ctl(("--socket", str(path)))


def test_ctl_prints_the_outcome_and_its_exit_code_says_if_it_was_accepted(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("hint", "kv.pin", "--session", "s", "--ttl", "5s").out == "kv.pin: accepted: 4 pages, 5s\n"
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"ids": IDS[:8]}))
    run = ctl.quick
    assert run("hint", "kv.retain", "--tokens", str(tokens), "--value", "0.5", "--ttl", "1s").out == (
        "kv.retain: accepted: 2 pages, 1s\n")
    assert run("hint", "kv.prefetch", "--tokens", str(tokens), "--destination", "device").code == 0
    late = run("hint", "kv.prefetch", "--session", "s", "--needed-in", "1h")
    assert late.out == "kv.prefetch: accepted: 4 pages\n"  # they are there
    found = run("hint", "session.wait", "--session", "s", "--expected", "3m", "--source", "planner")
    assert found.out == "session.wait: accepted: 2 pages\n"  # two are retained
    assert run("hint", "kv.release", "--tokens", str(tokens)).out.startswith("kv.release: accepted: 2 pages")
    assert run("hint", "kv.demote", "--session", "s", "--destination", "host").out == "kv.demote: accepted: 4 pages\n"
    assert run("hint", "kv.release", "--session", "s").out == "kv.release: accepted: 4 pages\n"
    missing = run("hint", "kv.pin", "--session", "unknown", code=1)
    assert missing.out == "kv.pin: missing; this session is not known here\n"
    assert run("hint", "kv.pin", code=1).out == missing.out
    tokens.write_text(json.dumps({"ids": IDS, "cache_salt": SALT}))
    assert run("hint", "session.turn", "--tokens", str(tokens), code=1).out.startswith("session.turn: missing")
    rejected = run("hint", "kv.pin", *KEYS, code=1).out
    assert rejected.startswith("kv.pin: rejected; ")


def test_ctl_prints_outcomes_as_a_document(ctl: Ctl) -> None:
    (found,) = ctl.quick("--json", "hint", "session.turn", "--session", "s").json
    assert found == {"action_id": "ctl", "action_type": "session.turn", "status": "accepted", "detail": "", "pages": 4,
                     "ttl_s": None}
    (found,) = ctl.quick("--json", "hint", "kv.pin", "--session", "none", code=1).json
    assert found["status"] == "missing"


@pytest.mark.parametrize(("arguments", "says"), [
    (["kv.share"], "kv.share"), (["kv.retain", "--value", "7"], "value"),
    (["session.wait", "--session", "s"], "expected_s"),
    (["kv.demote", "--destination", "device"], "destination"), (["kv.pin", "xyz"], "not a page key"),
    (["kv.pin", "--ttl", "soon"], "soon"), (["kv.pin", "--ttl", "0s"], "ttl_s"),
    (["kv.pin", "--tokens", "/none"], "/none"),
    (["session.wait", "--session", "", "--expected", "1s"], "session_id"),
])
def test_ctl_says_what_is_wrong_and_sends_nothing(arguments: list[str], says: str) -> None:
    ended = Ctl(("--socket", "/nowhere/s.sock")).quick("hint", *arguments, code=2)
    assert says in ended.err and "/nowhere" not in ended.err


def test_ctl_takes_a_prompt_or_its_page_keys(ctl: Ctl, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(IDS))
    assert "pass one of them" in ctl.quick("hint", "kv.pin", KEYS[0], "--tokens", str(tokens), code=2).err


# A daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that the last test leaves full of pins."""
    with Daemon(tmp_path_factory.mktemp("hinted"), pool=f"{POOL_BYTES}B") as running:
        yield running


def hint(daemon: Daemon, kind: str, **payload: Any) -> Any:
    status, found = daemon.ask("POST", "/v1/hints", {"actions": [action(kind, **payload)]})
    assert status == 200, found
    return found[0]


def test_a_daemon_pins_fetches_and_drops_pages_of_its_pool(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA)
    body = {"namespace": "aa", "page_keys": [key.hex() for key in keys]}
    found = hint(daemon, "kv.pin", **body, ttl_s=60)
    assert (found["status"], found["pages"], found["ttl_s"]) == ("accepted", 4, 60)
    dropped = hint(daemon, "kv.release", **body)
    assert (dropped["status"], dropped["pages"]) == ("missing", 0)  # pinned pages stay
    (pin,) = daemon.admin("GET", "/pins")
    daemon.admin("DELETE", f"/pins/{pin['id']}", code=204)
    assert hint(daemon, "kv.demote", **body, destination="host")["status"] == "rejected"
    assert daemon.places(keys) == [["pool", "ram", "disk"]] * 4
    assert hint(daemon, "kv.demote", **body, destination="storage")["pages"] == 4
    assert daemon.places(keys) == [["ram", "disk"]] * 4
    assert hint(daemon, "kv.pin", **body)["status"] == "missing"
    assert hint(daemon, "kv.prefetch", **body)["pages"] == 4
    assert daemon.places(keys) == [["pool", "ram", "disk"]] * 4
    released = hint(daemon, "kv.release", namespace="aa", page_keys=[keys[3].hex(), "0" * 64])
    assert (released["status"], released["pages"]) == ("clipped", 1)
    assert daemon.places(keys)[3] == ["ram", "disk"]
    ctl = Ctl(("-c", str(daemon.config_file)))
    assert ctl.quick("hint", "kv.release", keys[2].hex(), "--namespace", "aa").out == "kv.release: accepted: 1 page\n"


def test_a_daemon_says_what_it_cannot_do(daemon: Daemon) -> None:
    keys = [key.hex() for key in filled(daemon, 0xAA, 2)]
    for kind, payload, says in (
        ("kv.retain", {"page_keys": keys}, "engine"), ("session.wait", {"session_id": "s", "expected_s": 1}, "engine"),
        ("kv.pin", {"tokens": IDS}, "page_keys only"), ("kv.pin", {"session_id": "s"}, "page_keys only"),
        ("kv.pin", {"page_keys": keys, "namespace": "12"}, "namespaces"), ("kv.share", {}, "not supported"),
        ("kv.pin", {"page_keys": keys, "ttl_s": 0}, "ttl_s"),
    ):
        found = hint(daemon, kind, **payload)
        assert found["status"] == "rejected" and says in found["detail"], found
    status, answer = daemon.ask("POST", "/v1/hints", {"actions": 5})
    assert status == 422 and set(answer) == {"error", "detail"}


def test_pins_of_hints_cannot_take_more_of_a_pool_than_its_share(daemon: Daemon) -> None:
    """The control of the limit is the number of pages that the pool has room for."""
    room = POOL_BYTES // PAGE_POOL_BYTES
    pinned = 0
    for first in range(0, 2 * room, 8):
        keys = keys_of(8, first=first)
        daemon.engine(0xCC).store(keys)
        pinned += hint(daemon, "kv.pin", namespace="cc", page_keys=[key.hex() for key in keys], ttl_s=3600)["pages"]
    assert room / 4 < pinned <= PINNED_SHARE_MAX * room
    fresh = keys_of(4, first=200)
    daemon.engine(0xBB).store(fresh)
    wait_for(lambda: all("pool" in page for page in daemon.places(fresh, namespace="bb" * 32)))
