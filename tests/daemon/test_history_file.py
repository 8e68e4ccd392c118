"""The file that keeps the history of a daemon's page across restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.daemon.history import FaultKind, History
from hicache.daemon.history_file import BYTES_MAX, HistoryFile
from tests.daemon.daemons import NAMESPACE, Daemon
from tests.daemon.snapshots import namespace, node
from tests.log_records import messages_of
from tests.waiting import wait_for


def recorded(*, faults: int = 1) -> History:
    """Return a history with two samples and some faults."""
    history = History()
    for uptime_s in (5.0, 10.0):
        history.record(node(namespace("Llama é"), uptime_s=uptime_s))
    for number in range(faults):
        history.note(FaultKind.CLIENT, f"engine{number}")
    return history


def loaded(path: Path) -> dict[str, Any]:
    """Return the history that a daemon with this file starts with."""
    history = History()
    asyncio.run(HistoryFile(path, history).load())
    return history.as_json()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.json"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the lines of the history's file in the log so far."""
    caplog.set_level(logging.INFO, "hicache")
    return lambda: messages_of(caplog, "daemon.history_file")


def test_a_saved_history_is_restored_whole_and_is_private(path: Path, lines: Callable[[], list[str]]) -> None:
    history = recorded()
    asyncio.run(HistoryFile(path, history).save())
    assert loaded(path) == history.as_json()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert lines() == []


def test_without_a_file_the_history_is_empty_and_nothing_is_logged(path: Path, lines: Callable[[], list[str]]) -> None:
    assert loaded(path)["rows"] == loaded(path)["faults"] == lines() == []


def test_the_rest_of_an_interrupted_save_is_ignored_and_replaced(path: Path) -> None:
    history = recorded()
    asyncio.run(HistoryFile(path, history).save())
    path.with_suffix(".new").write_bytes(b'{"rows": [[')
    assert loaded(path) == history.as_json()
    asyncio.run(HistoryFile(path, history).save())
    assert os.listdir(path.parent) == [path.name]


def changed(**entries: Any) -> bytes:
    """Return a valid history, as a file, with other entries."""
    return json.dumps(recorded().as_json() | entries).encode()


ROW = recorded().as_json()["rows"][0]
FAULT = recorded().as_json()["faults"][0]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"not a history", changed()[:-1], b"[" * 100_000, b"[]", b"{}", b"\xff" * 100,
        changed(columns=["time"]), changed(rows=[ROW[:-1]]), changed(rows=[[*ROW, 1]]), changed(rows=[["1", *ROW[1:]]]),
        changed(rows=[[*ROW[:-2], -1, {}]]), changed(rows=[[*ROW[:-2], 0.5, {}]]),
        changed(rows=[[*ROW[:-1], {"new": -1}]]), changed(rows=[[*ROW[:-1], {"new": 0.5}]]),
        changed(rows=[[float("nan"), *ROW[1:]]]),
        changed(faults=[FAULT | {"kind": "flood"}]), changed(faults=[FAULT | {"count": "many"}]),
        changed(faults=[FAULT | {"count": -1}]), changed(faults=[{}]),
        changed(faults=[FAULT | {"detail": "x" * BYTES_MAX}]),
    ],
)
def test_a_damaged_foreign_or_too_large_file_is_an_empty_history_and_is_replaced(
    path: Path, content: bytes, lines: Callable[[], list[str]]
) -> None:
    path.write_bytes(content)
    assert loaded(path)["rows"] == loaded(path)["faults"] == []
    assert len(lines()) == 2 and len(set(lines())) == 1  # one for each time that it was loaded
    assert "cannot be used, so the page's plots start empty: it" in lines()[0] and "xxx" not in lines()[0]
    history = recorded()
    asyncio.run(HistoryFile(path, history).save())
    assert loaded(path) == history.as_json()


def test_the_unchanged_content_of_these_files_is_valid(path: Path, lines: Callable[[], list[str]]) -> None:
    path.write_bytes(changed())
    assert loaded(path)["rows"] and loaded(path)["faults"] and not lines()


@pytest.mark.parametrize("make", [
    Path.mkdir, os.mkfifo, lambda path: path.symlink_to(__file__), lambda path: path.symlink_to("/dev/zero"),
], ids=["directory", "pipe", "link", "device"])
def test_anything_but_a_file_is_an_empty_history_and_does_not_block(
    path: Path, make: Callable[[Path], None], lines: Callable[[], list[str]]
) -> None:
    make(path)
    assert loaded(path)["rows"] == []
    assert len(lines()) == 1 and "cannot be used" in lines()[0]


def test_a_history_that_cannot_be_saved_is_one_line_until_it_can_be(
    path: Path, lines: Callable[[], list[str]]
) -> None:
    file = HistoryFile(path / "away" / "history.json", recorded())
    asyncio.run(file.save())
    asyncio.run(file.save())
    assert len(lines()) == 1 and "cannot be written, so a restart clears the page's plots: No such file" in lines()[0]
    (path / "away").mkdir(parents=True)
    asyncio.run(file.save())
    (path / "away" / "history.json").unlink()
    (path / "away").rmdir()
    asyncio.run(file.save())
    assert len(lines()) == 2


def test_the_history_is_saved_once_per_interval(path: Path) -> None:
    async def keep() -> None:
        ending = asyncio.Event()
        keeping = asyncio.create_task(HistoryFile(path, recorded(), 0.01).keep(ending))
        for _ in range(2):
            await asyncio.to_thread(wait_for, path.exists)
            path.unlink()
        ending.set()
        await keeping

    asyncio.run(keep())


def rows(daemon: Daemon) -> list[dict[str, Any]]:
    history = daemon.ask("GET", "/history")[1]
    return [dict(zip(history["columns"], row, strict=True)) for row in history["rows"]]


def test_the_history_of_a_daemon_survives_its_restart(start: Callable[..., Daemon]) -> None:
    """The times before and after the restart are of one clock, and no count falls."""
    daemon = start()
    with contextlib.closing(daemon.tcp()) as stranger:
        assert stranger.call("GET", f"/v1/namespaces/{NAMESPACE}/usage")[0] == 401
    wait_for(lambda: daemon.ask("GET", "/history")[1]["faults"] != [], pause_s=0.05)
    before, faults = rows(daemon), daemon.ask("GET", "/history")[1]["faults"]
    assert daemon.stop() == 0
    restarted_at = time.time()
    daemon.start()
    wait_for(lambda: len(rows(daemon)) > len(before))
    after = rows(daemon)
    assert after[: len(before)] == before and daemon.ask("GET", "/history")[1]["faults"] == faults
    assert before[-1]["time"] < restarted_at < after[-1]["time"]
    assert all(value >= 0 for row in after for value in row.values() if not isinstance(value, dict))
