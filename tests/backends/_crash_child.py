"""Processes that kill themselves, or are killed, in the middle of a file store's operations.

One helper process imports everything once and forks a child per job (a line of JSON on standard input), so that a kill
costs milliseconds. It answers each job with a line of JSON: how the child ended, which pages it reported as stored, and
how many calls it made.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from hicache_lab.conformance import NAMESPACE, STORED, full_frames, load, make_keys, soon
from hicache_lab.conformance.pages import in_parts

from ._files import FORMS, PAGE, Faulty, file_driver, open_file, purge

CAPACITY_PAGES = 8
# A last use that no page has, and enough pages for an index of many blocks.
MARK_US = 1 << 60
HALF_PAGES = 200


class _Killer:
    """Kills this process before its n-th counted call; a statement of SQLite counts as a call."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.calls = 0
        self._lock = threading.Lock()

    def step(self, *_: Any) -> None:
        with self._lock:
            self.calls += 1
            if self.calls == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def _open(root: Path, killer: _Killer, form: str, **options: Any) -> Any:
    store = open_file(root, FORMS[form], system=Faulty(killer.step), **options)
    index = file_driver(store)._store._index_file.opened
    assert index is not None and index._db is not None
    index._db.set_trace_callback(killer.step)
    return store


def _store(store: Any, keys: list[bytes]) -> list[Any]:
    """Store a chain, every second page in parts."""
    codec = store.backend.codec
    pages = [in_parts(codec, frame) if number % 2 else frame for number, frame in enumerate(full_frames(codec, keys))]
    outcomes: list[Any] = store.backend.batch_set(keys, pages, parent=None, deadline=soon())
    return outcomes


def scenario(name: str, root: Path, killer: _Killer, form: str, acknowledge: Any) -> None:
    """Run one scenario in a child; pass the name of each chain and the number of its stored pages to `acknowledge`."""
    if name == "write":
        store = _open(root, killer, form)
        acknowledge("old", 4)
        for chain in ("one", "two"):
            stored = _store(store, make_keys(3, chain)).count(STORED)
            acknowledge(chain, stored)
        store.backend.close()
    elif name == "evict":
        store = _open(root, killer, form, capacity=CAPACITY_PAGES * PAGE)
        _store(store, make_keys(4, "one"))
        load(store, make_keys(4, "old"))
        _store(store, make_keys(4, "two"))
        store.backend.close()
    elif name == "sweep":
        store = _open(root, killer, form, capacity=CAPACITY_PAGES * PAGE)
        load(store, make_keys(4, "old"))
        store.backend.delete(make_keys(2, "old"), deadline=soon())
        store.backend.clear(deadline=soon())
        store.backend.close()
        purge(root)
    elif name == "half a transaction":
        store = _open(root, killer, form)
        with file_driver(store)._store.transaction(soon()) as index:
            # SQLite then writes into the index before the end of the transaction.
            index._run("PRAGMA cache_size = 1")
            index.touch(NAMESPACE, {key: MARK_US for key in make_keys(HALF_PAGES, "half")})
            os.kill(os.getpid(), signal.SIGKILL)
    elif name == "singles":  # with the native helper, until killed
        store = open_file(root, FORMS[form])
        keys = make_keys(4000, "single")
        for number, (key, frame) in enumerate(zip(keys, full_frames(store.backend.codec, keys), strict=True)):
            parent = keys[number - 1] if number else None
            (outcome,) = store.backend.batch_set([key], [frame], parent=parent, deadline=soon())
            assert outcome == STORED
            acknowledge("single", number + 1)
    else:  # continue until killed
        store = _open(root, killer, form, capacity=CAPACITY_PAGES * PAGE)
        turn = 0
        while True:
            turn += 1
            _store(store, make_keys(1 + turn % 5, f"chain {turn % 7}"))
            load(store, make_keys(5, f"chain {turn % 3}"))
            if turn % 11 == 0:
                store.backend.delete(make_keys(5, f"chain {turn % 7}"), deadline=soon())
            if turn % 17 == 0:
                store.backend.close()
                store = _open(root, killer, form, capacity=CAPACITY_PAGES * PAGE)


def _child(job: dict[str, Any], report_fd: int) -> None:
    killer = _Killer(job["kill_at"])

    def acknowledge(chain: str, pages: int) -> None:
        os.write(report_fd, f"{chain}={pages}\n".encode())

    scenario(job["scenario"], Path(job["root"]), killer, job["form"], acknowledge)
    os.write(report_fd, f"calls={killer.calls}\n".encode())


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_fd)
            _child(job, write_fd)
            status = 0
        finally:
            os._exit(status)
    os.close(write_fd)
    if job["kill_after_s"] is not None:
        watch = os.pidfd_open(pid)
        select.select([watch], [], [], job["kill_after_s"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(watch)
    with os.fdopen(read_fd) as reports:
        told = dict(line.strip().split("=") for line in reports)
    _, status = os.waitpid(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "told": {name: int(count) for name, count in told.items()}}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
