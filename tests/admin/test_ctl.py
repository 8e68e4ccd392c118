"""Every command of `hicache ctl`, run against the cache of a running engine."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hicache.admin.models import JobState, ScrubRequest
from hicache.cli.ctl_client import Address, AdminClient
from hicache.cli.ctl_jobs import watch
from tests.admin.ctl import Ctl
from tests.admin.running import DIGEST, IDS, KEYS, PROMPT, RunningEngine
from tests.admin.test_embedded import damage_one
from tests.waiting import wait_for

pytestmark = pytest.mark.long


@pytest.fixture
def ctl(levels: RunningEngine) -> Ctl:
    """Runs commands for an engine whose stores `ram` and `disk` both have PROMPT."""
    levels.serve("a", PROMPT)
    wait_for(lambda: levels.places(keys=KEYS) == [["device", "host", "ram", "disk"]] * 4)
    # The usage in a status is a measurement that may be older than these pages.
    wait_for(lambda: [one["pages"] for one in levels.ask("GET", "/status")["stores"]] == [4, 4])
    return Ctl(("--socket", str(levels.config.admin.socket)))


def test_the_status_fits_wide_and_narrow_terminals(ctl: Ctl) -> None:
    wide, narrow = ctl("status").out, ctl.quick("status", columns=60).out
    assert "embedded 0.1.0, ready" in wide and "storage attached" in wide
    (line,) = [line for line in wide.splitlines() if line.startswith("disk")]
    assert line.split() == ["disk", DIGEST[:12], "4", "16.0", "KiB", "10.0", "GiB", "ok", "ok", "0", "0"]
    assert max(map(len, wide.splitlines())) <= 120
    # The narrow output has all figures: a value that does not fit into the row gets a separate line.
    assert max(map(len, narrow.splitlines())) <= 60
    lines = [line.split() for line in narrow.splitlines()]
    assert ["store", "disk"] in lines and ["capacity", "10.0", "GiB"] in lines and ["pages", "4"] in lines


def test_lists_are_printed_as_tables_and_as_documents(ctl: Ctl) -> None:
    stores = ctl("--json", "stores").json
    assert [(one["name"], one["namespace"], one["bytes"]) for one in stores] == [
        ("ram", DIGEST, 16384), ("disk", DIGEST, 16384)
    ]
    assert [one["namespace"] for one in ctl("--json", "namespaces").json] == [DIGEST]
    assert ctl("clients").out == "no clients with shared memory\n"
    assert ctl("quota").out == "no quotas\n"
    assert "pool of a daemon" in ctl.quick("quota", "ab", "1MiB", code=2).err
    assert "a size too" in ctl.quick("quota", "ab", code=2).err


def test_lookup_takes_keys_prefixes_and_tokens(ctl: Ctl, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(IDS))
    lines = ctl("lookup", "--tokens", str(tokens)).out.splitlines()[1:]
    assert [line.split(maxsplit=2) for line in lines] == [[key[:16], DIGEST[:12], "device, ram, disk"] for key in KEYS]
    assert "device, host" in ctl.quick("lookup", KEYS[0][:10]).out
    (page,) = ctl.quick("--json", "lookup", KEYS[3].upper()).json["pages"]
    assert page["places"] == ["device", "host", "ram", "disk"]
    assert ctl.quick("lookup", "0" * 64, code=1).out.splitlines()[1].split() == ["0" * 16, "-", "nowhere"]
    assert "not a page key" in ctl.quick("lookup", "xyz", code=2).err
    tokens.write_text('{"ids": [1, 2, "secret"]}')
    assert "secret" not in ctl.quick("lookup", "--tokens", str(tokens), code=2).err


def test_a_prefix_is_pinned_listed_and_unpinned(ctl: Ctl, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"ids": IDS}))
    with tokens.open() as stdin:
        made = ctl("--json", "pin", "--tokens", "-", "--ttl", "1h", stdin=stdin).json
    assert (made["pages"], made["asked_pages"]) == (4, 4)
    assert ctl("pin").out.splitlines()[1].split() == [made["id"], DIGEST[:12], "4", "4", "59m"]
    ctl("unpin", made["id"])
    assert ctl.quick("pin").out == "no pins\n"
    assert "list the pins" in ctl.quick("unpin", made["id"], code=2).err
    tokens.write_text("[7, 7, 7, 7]")
    assert "nothing is pinned" in ctl.quick("pin", "--tokens", str(tokens), code=1).out


def test_stores_are_bypassed_forced_detached_and_attached(ctl: Ctl, levels: RunningEngine) -> None:
    ctl("bypass", "disk")
    assert "forced off" in ctl.quick("stores").out
    shown = ctl.quick("status").out
    assert "forced: disk/read off" in shown
    assert "PROBLEM: disk keeps nothing since" in shown and "`hicache ctl bypass STORE --end` uses it again" in shown
    ctl.quick("bypass", "disk", "--end")
    assert "PROBLEM" not in ctl.quick("status").out
    ctl("breaker", "ram", "on", "--direction", "read")
    assert "forced on" in ctl.quick("stores").out
    ctl.quick("breaker", "all", "auto")
    assert "forced" not in ctl.quick("stores").out
    assert "without a terminal" in ctl("detach", code=2).err
    assert "bypass it" in ctl.quick("detach", "disk", "--yes", code=2).err
    ctl.quick("detach", "--yes")
    assert ctl.quick("stores").out == "no stores are open\n" and "DETACHED" in ctl.quick("status").out
    ctl("attach", "disk")
    wait_for(lambda: [one["name"] for one in levels.ask("GET", "/status")["stores"]] == ["disk"])
    assert "the stores are: ram, disk" in ctl.quick("attach", "tape", code=2).err


def test_clear_asks_for_confirmation_on_a_terminal_and_needs_yes_without_one(ctl: Ctl, levels: RunningEngine) -> None:
    assert "pass --yes" in ctl("clear", "--all", code=2).err
    assert "one of --pool" in ctl.quick("clear", "--yes", code=2).err
    controller, terminal = pty.openpty()
    os.write(controller, b"n\n")
    ended = ctl("clear", "--all", code=1, stdin=terminal)
    assert "Remove all pages of ALL namespaces" in ended.err
    assert len(levels.places(keys=KEYS)[0]) == 4
    os.write(controller, b"y\n")
    ended = ctl("clear", "--store", "disk", "--namespace", DIGEST[:8], stdin=terminal)
    assert "4 pages" in ended.out and levels.places(keys=KEYS) == [["device", "host", "ram"]] * 4
    os.close(controller)
    os.close(terminal)
    assert "done" in ctl.quick("clear", "--pool", "--yes").out
    assert levels.places(keys=KEYS) == [["ram"]] * 4


def test_a_scrub_that_finds_damage_ends_with_exit_code_1(ctl: Ctl, tmp_path: Path) -> None:
    assert "damaged   none" in ctl("scrub").out
    damage_one(tmp_path)
    ended = ctl.quick("scrub", "disk", "--remove", code=1)
    assert f"disk  {DIGEST[:12]}  {KEYS[1][:16]}  tag" in ended.out
    assert "damaged   1 page" in ended.out and "removed   1 page" in ended.out
    job = ctl.quick("--json", "scrub", "disk").json
    assert (job["state"], job["progress"]["pages"], job["progress"]["damaged"]) == ("done", 3, {})
    assert [line.split()[1] for line in ctl("jobs").out.splitlines()[1:]] == ["done"] * 3


def test_ctrl_c_cancels_a_scrub_and_prints_its_result(ctl: Ctl, levels: RunningEngine) -> None:
    process = ctl.start("scrub", "disk", "--rate", "4KiB")
    wait_for(lambda: any(job["progress"]["pages"] for job in levels.ask("GET", "/jobs")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "cancelling" in err and "cancelled after" in out and "read " in out
    assert [job["state"] for job in levels.ask("GET", "/jobs")] == ["cancelled"]


class Interrupted(AdminClient):
    """A client whose user presses Ctrl-C after a job has begun and before its answer is used."""

    def post(self, *arguments: Any) -> Any:
        job = super().post(*arguments)
        signal.raise_signal(signal.SIGINT)
        return job


@pytest.mark.usefixtures("ctl")
def test_an_interrupt_while_a_job_is_being_started_cancels_it(levels: RunningEngine) -> None:
    request = ScrubRequest(store="disk", rate_bytes_per_s=4096)
    with closing(Interrupted(Address(levels.config.admin.socket), lambda: None)) as client:
        assert watch(client, "/scrub", request).state is JobState.CANCELLED
    assert [job["state"] for job in levels.ask("GET", "/jobs")] == ["cancelled"]


def test_a_background_job_is_watched_and_cancelled(ctl: Ctl) -> None:
    started = ctl.quick("--json", "scrub", "disk", "--rate", "1KiB", "--background").json
    assert started["state"] in ("queued", "running")
    assert "cancelled" in ctl.quick("jobs", started["id"], "--cancel", code=130).out
    assert "list the jobs" in ctl.quick("jobs", "none", code=2).err


def test_the_log_level_is_shown_and_set(ctl: Ctl) -> None:
    assert ctl("logs", "error").out == "error\n"
    assert ctl.quick("--json", "logs").json == {"level": "error"}
    assert not logging.getLogger("hicache.cache").isEnabledFor(logging.WARNING)


def test_without_a_server_the_error_says_what_to_do(tmp_path: Path) -> None:
    for address in (("--socket", str(tmp_path / "none")), ("--url", "http://localhost:1")):
        assert "hicache serve" in Ctl(address).quick("status", code=2).err
    for url in ("ftp://host", "http://operator:secret@host:1", "http://host:1/path"):
        said = Ctl(("--url", url)).quick("status", code=2).err
        assert "--url" in said and "host:" in said and "secret" not in said
    assert "one of --socket and --url" in Ctl(("--url", "http://h:1", "--socket", "x")).quick("status", code=2).err


def test_the_address_is_read_from_the_configuration(levels: RunningEngine, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"admin: {{socket: {levels.config.admin.socket}}}\n")
    assert Ctl(("-c", str(config))).quick("--json", "status").json["kind"] == "embedded"
