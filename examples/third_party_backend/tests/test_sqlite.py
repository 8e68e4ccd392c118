"""The SQLite store under both contract suites, and tests of its own behaviour."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from hicache_sqlite import SqliteDriver

from hicache.backends.base import SetOutcome
from hicache.backends.errors import StoreError
from hicache.backends.registry import BackendSpec, open_stored
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    SET_ERROR,
    STORED,
    DriverContract,
    InspectionContract,
    OpenStore,
    OpenStored,
    Subject,
    bare,
    driver_of,
    full_frames,
    load,
    make_keys,
    open_backend,
    soon,
    store_chain,
    store_of,
)

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
WHERE = "WHERE namespace = ? AND key = ?"


def opened(path: Path, codec: FrameCodec = CODEC) -> Subject:
    """Return the store at `path`, with raw access to its pages by SQL."""

    def read(key: bytes) -> bytes | None:
        db = sqlite3.connect(path)
        found = db.execute(f"SELECT frame FROM pages {WHERE}", (codec.namespace, key)).fetchone()
        db.close()
        return None if found is None else bytes(found[0])

    def write(key: bytes, data: bytes) -> None:
        db = sqlite3.connect(path)
        db.execute("REPLACE INTO pages(namespace, key, used, frame) VALUES(?, ?, 0, ?)", (codec.namespace, key, data))
        db.commit()
        db.close()

    return Subject(store_of(SqliteDriver, codec, path), read, write)


class TestSqliteDriver(DriverContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: opened(tmp_path / "pages.db", codec)


class TestInspection(InspectionContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: opened(tmp_path / "pages.db", codec)

    @pytest.fixture
    def open_stored(self, tmp_path: Path) -> OpenStored:
        return lambda: open_stored(BackendSpec("sqlite", {"path": str(tmp_path / "pages.db")}))


def test_a_store_locked_by_another_process_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    store = opened(tmp_path / "pages.db")
    db = sqlite3.connect(tmp_path / "pages.db", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    keys = make_keys(2)
    frames = full_frames(CODEC, keys)
    outcomes = store.backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + 0.05)
    assert (outcomes, store.backend.statistics().errors) == ([SET_ERROR] * 2, {"SQLITE_BUSY": 2})
    db.execute("ROLLBACK")
    db.close()
    assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * 2
    store.backend.close()


@pytest.mark.parametrize(
    ("pragma", "outcome", "errors"),
    [("max_page_count = 20", SetOutcome.REJECTED, {}), ("query_only = 1", SET_ERROR, {"SQLITE_READONLY": 30})],
)
def test_a_full_store_rejects_pages_and_a_read_only_store_reports_errors(
    tmp_path: Path, pragma: str, outcome: SetOutcome, errors: dict[str, int]
) -> None:
    store, keys = opened(tmp_path / "pages.db"), make_keys(30)
    driver_of(store.backend, SqliteDriver)._db.execute(f"PRAGMA {pragma}").fetchall()
    assert store_chain(store, keys) == [outcome] * 30
    assert store.backend.statistics().errors == errors
    assert load(store, keys) == [MISS] * 30
    store.backend.close()


def test_a_disk_that_is_full_before_the_first_page_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(deadline: float, *, writing: bool = False) -> None:
        raise StoreError("SQLITE_FULL")

    driver, keys = SqliteDriver(CODEC, tmp_path / "pages.db"), make_keys(2)
    monkeypatch.setattr(driver, "_locked", full)
    backend = bare(driver, CODEC)
    assert backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=soon()) == [SET_ERROR] * 2
    assert backend.statistics().errors == {"SQLITE_FULL": 2}
    backend.close()


def test_a_failed_removal_can_be_retried(tmp_path: Path) -> None:
    store = opened(tmp_path / "pages.db")
    assert store_chain(store, make_keys(3)) == [STORED] * 3
    db = driver_of(store.backend, SqliteDriver)._db
    stored = open_stored(BackendSpec("sqlite", {"path": str(tmp_path / "pages.db")}))
    pages = list(stored.pages())
    db.execute("CREATE TRIGGER failure BEFORE DELETE ON pages BEGIN SELECT RAISE(FAIL, 'failure'); END")
    with pytest.raises(BackendUnavailable, match="SQLITE_CONSTRAINT"):
        stored.remove(pages)
    db.execute("DROP TRIGGER failure")
    assert stored.remove(pages) == 3
    stored.close()
    store.backend.close()


def test_a_file_that_is_not_a_database_is_rejected_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("Dear diary, " * 100)
    with pytest.raises(BackendUnavailable, match="not a database"):
        SqliteDriver(CODEC, tmp_path / "diary.txt")
    assert (tmp_path / "diary.txt").read_text().startswith("Dear diary")


def test_the_entry_point_is_found_by_name_and_unknown_options_are_rejected(tmp_path: Path) -> None:
    backend = open_backend("sqlite", CODEC, {"path": str(tmp_path / "pages.db")})
    assert driver_of(backend, SqliteDriver)
    backend.close()
    with pytest.raises(ConfigError, match="did you mean 'path'"):
        open_backend("sqlite", CODEC, {"pathh": str(tmp_path / "pages.db")})


def test_a_store_that_can_be_listed_accepts_a_limit(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "pages.db"), "capacity": 10 * CODEC.frame_bytes}
    backend = open_backend("sqlite", CODEC, options)
    assert backend.usage().capacity_bytes == 10 * CODEC.frame_bytes
    store = Subject(backend, lambda key: None, lambda key, data: None)
    assert store_chain(store, make_keys(12))[:10] == [STORED] * 10
    backend.close()
    stored = open_stored(BackendSpec("sqlite", options))
    assert 0 < len(list(stored.pages())) <= 10
    stored.close()
    with pytest.raises(ConfigError, match="at least a page"):
        open_backend("sqlite", CODEC, {**options, "capacity": 1})
