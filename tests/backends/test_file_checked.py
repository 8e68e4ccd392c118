"""What an opening checks: nothing twice. After a clean close the directories that changed since, after a kill the names
of all files, otherwise everything; and it waits for a process that checks."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.file.store import FileStore
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import HIT, STORED, Subject, full_frames, load, make_keys, soon, store_chain

from ._files import CODEC, PAGE, Faulty, check, file_driver, open_file, page_path, temporary_files

KEYS = make_keys(40)


class Counting(Faulty):
    """Counts the page directories that are listed and the pages that are looked at; `boot` replaces the boot id."""

    def __init__(self, boot: str | None = None) -> None:
        super().__init__(self._count)
        self.listed = self.looked = 0
        self._boot = boot

    def _count(self, name: str, number: int, args: tuple[Any, ...]) -> str | None:
        self.listed += name == "listdir" and os.readlink(f"/proc/self/fd/{args[0]}")[-3] == "/"
        self.looked += name == "lstat_listed"
        return self._boot if name == "fact" and args[0].endswith("boot_id") else None


@pytest.fixture
def closed(root: Path) -> Path:
    """A store of KEYS after a clean close."""
    store = open_file(root)
    assert store_chain(store, KEYS) == [STORED] * len(KEYS)
    store.backend.close()
    return root


def killed(root: Path) -> None:
    """Open the store in a process that is killed."""
    pid = os.fork()
    if pid == 0:
        open_file(root)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def opened(root: Path, system: Counting) -> Subject:
    """Open the store, and check that it is sound."""
    store = open_file(root, system=system)
    system.armed = False
    check(store, root)
    return store


def stray(root: Path, key: bytes) -> None:
    """Add a page by hand."""
    (frame,) = full_frames(CODEC, [key])
    page_path(root, CODEC, key).parent.mkdir(exist_ok=True)
    page_path(root, CODEC, key).write_bytes(CODEC.seal(key, frame))


def test_after_a_clean_close_an_opening_looks_at_no_page(closed: Path) -> None:
    for _ in range(2):
        system = Counting()
        store = opened(closed, system)
        assert (system.listed, system.looked) == (0, 0)
        assert load(store, KEYS) == [HIT] * len(KEYS)
        store.backend.close()


def test_after_a_clean_close_only_changed_directories_are_compared(closed: Path) -> None:
    page_path(closed, CODEC, KEYS[-1]).unlink()
    stray(closed, new := make_keys(1, "new")[0])
    shutil.rmtree(page_path(closed, CODEC, KEYS[-2]).parent)
    system = Counting()
    store = opened(closed, system)
    assert system.listed <= 3
    assert load(store, [new]) == [HIT]


def test_a_process_that_starts_beside_another_compares_nothing(closed: Path) -> None:
    first = open_file(closed)
    assert store_chain(first, make_keys(3, "more")) == [STORED] * 3
    system = Counting()
    opened(closed, system)
    assert (system.listed, system.looked) == (0, 0)


@pytest.mark.parametrize("beside", [True, False])
def test_after_a_kill_names_are_compared_and_only_other_files_are_looked_at(closed: Path, beside: bool) -> None:
    survivor = open_file(closed) if beside else None
    killed(closed)
    page_path(closed, CODEC, KEYS[-1]).unlink()
    system, folders = Counting(), len(list(closed.glob("*/??")))
    opened(closed, system)
    assert system.listed == folders and system.looked < len(KEYS) / 2
    assert len([name for name in temporary_files(closed) if name.endswith(".alive")]) == 1 + beside
    if survivor is not None:
        check(survivor, closed)


@pytest.mark.parametrize("how", ["a restart of the machine", "a copy", "a changed index", "nothing known",
                                 "an unknown boot"])
def test_all_files_are_looked_at_after(closed: Path, how: str) -> None:
    if how == "a restart of the machine":
        killed(closed)
        for path in (closed / "tmp").iterdir():
            path.write_bytes(b"")
    elif how == "a copy":
        shutil.copytree(closed, copy := closed.with_name("copy"))
        closed = copy
    elif how == "a changed index":
        os.utime(next(closed.glob("index-*.sqlite")))
    elif how == "an unknown boot":
        (closed / "checked").unlink()
    else:
        (closed / "checked").write_bytes(b"\xff nonsense\n\n" * 100)
    page_path(closed, CODEC, KEYS[0]).write_bytes(b"torn")
    system = Counting(boot={"a restart of the machine": "another", "an unknown boot": "-"}.get(how))
    opened(closed, system)
    assert system.looked == len(KEYS)


def test_a_process_that_closes_before_it_can_undo_a_failure_leaves_that_to_the_next(closed: Path) -> None:
    others = open_file(closed)
    store = FileStore(closed, create=False)
    with pytest.raises(ValueError, match="in between"), store.transaction(soon()) as index:
        index.drop(CODEC.namespace, KEYS[-1])
        page_path(closed, CODEC, KEYS[-1]).unlink()
        raise ValueError("in between")
    store.close()
    assert others.backend.usage().pages == len(KEYS), "the control: a row without a file"
    opened(closed, Counting())
    check(others, closed)


def test_the_last_of_several_processes_that_close_vouches_for_the_store(closed: Path) -> None:
    stores = [open_file(closed) for _ in range(3)]
    for store in stores:
        assert CODEC.namespace.hex() not in (closed / "checked").read_text()
        store.backend.close()
    assert CODEC.namespace.hex() in (closed / "checked").read_text()
    assert temporary_files(closed) == []


@pytest.mark.parametrize("moves", [True, False])
def test_an_opening_waits_while_the_process_that_holds_the_lock_makes_progress(
    closed: Path, moves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other, attempts = closed / "tmp" / f"{file_driver(open_file(closed))._store.owner}.alive", itertools.count()

    def before(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "flock" and args[1] != fcntl.LOCK_UN and next(attempts) < 3:
            if moves:
                os.utime(other, (number, number))
            raise TimeoutError("the lock was held until the deadline")

    if moves:
        store = open_file(closed, system=Faulty(before))
        assert caplog.text.count("waits for a process that compares its index with its files") == 3
        assert load(store, KEYS) == [HIT] * len(KEYS)
        return
    with pytest.raises(BackendUnavailable, match=r"makes no progress; .* suspended .*; end it, or try again") as raised:
        open_file(closed, system=Faulty(before))
    assert "permissions" not in str(raised.value)




@pytest.mark.parametrize("place", [0, 1])
def test_a_bit_flipped_in_the_key_of_the_next_victim_costs_one_batch_at_most(closed: Path, place: int) -> None:
    """In the table, or in the index by key: an eviction that does not find its row would never end."""
    keeper, (path,) = open_file(closed), closed.glob("index-*.sqlite")
    places = [one.start() for one in re.finditer(re.escape(KEYS[-1]), path.read_bytes())]
    assert len(places) == 2
    with path.open("r+b") as file:
        file.seek(places[place])
        file.write(bytes([KEYS[-1][0] ^ 1]))
    store = open_file(closed, capacity=len(KEYS) * PAGE)
    batches = [store_chain(store, make_keys(3, f"new {number}")) for number in range(4)]
    assert sum(batch != [STORED] * 3 for batch in batches) <= 1, batches
    check(store, closed)
    check(keeper, closed)
