"""The index is a cache of the directory: bounded, and rebuilt whenever it is not a valid index."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file.index import JOURNAL, JOURNAL_BYTES, Index
from hicache.backends.file.store import FileStore
from hicache.backends.tools.removal import trim_stored
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import (
    HIT,
    NAMESPACE,
    SET_ERROR,
    STORED,
    Subject,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds

from ._files import (
    CODEC,
    PAGE,
    Faulty,
    check,
    disk_usage,
    file_driver,
    obstruct,
    open_file,
    open_stored,
    page_path,
    purge,
    verify,
)
from .test_file_crash import Killing

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]
REJECTED = SetOutcome.REJECTED
CHAINS = [make_keys(5, f"chain {number}") for number in range(12)]
FLIPS = 50
JOURNAL_FLIPS = 15


def index_path(root: Path) -> Path:
    (path,) = root.glob("index-*.sqlite")
    return path


def fill(root: Path) -> None:
    store = open_file(root)
    for keys in CHAINS:
        store_chain(store, keys)
    store.backend.close()


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def assert_tools_work(root: Path, pages: int) -> None:
    """Check that the reading tools work, then the removing ones."""
    raw = open_stored(path=root)
    assert len(list(raw.pages())) == pages
    # The only damage that no check can detect is another last use of one page that has children.
    assert purge(root, older_than_s=3600, dry_run=True).pages <= 1
    scrubbed = verify(root)
    assert (scrubbed.pages, dict(scrubbed.damaged)) == (pages, {})
    *_, trimmed = trim_stored(raw, 5 * PAGE)
    assert trimmed.left_bytes == 5 * PAGE
    raw.close()
    assert purge(root).pages == 5


def assert_sound(store: Subject, root: Path) -> None:
    """Check that a newly opened store stores pages and that its index matches the disk."""
    assert store_chain(store, make_keys(5, "new")) == [STORED] * 5
    check(store, root)
    store.backend.close()
    store = open_file(root, capacity=20 * PAGE)
    assert store.backend.usage().pages == 20
    check(store, root)
    store.backend.close()


@pytest.mark.parametrize("seed", seeds(1))
def test_a_store_starts_with_a_flipped_bit_in_its_index(tmp_path: Path, seed: int) -> None:
    dice, template = rng(seed), tmp_path / "template"
    fill(template)
    bits = index_path(template).stat().st_size * 8
    # Half of the flips are in the header, which SQLite trusts.
    for bit in [dice.randrange(800 if number % 2 else bits) for number in range(FLIPS)]:
        root = tmp_path / f"bit {bit}"
        shutil.copytree(template, root, dirs_exist_ok=True)
        flip(index_path(root), bit)
        shutil.copytree(root, tmp_path / "copy", dirs_exist_ok=True)
        assert_tools_work(tmp_path / "copy", 60)
        store = open_file(root)
        assert [load(store, keys) for keys in CHAINS] == [[HIT] * 5] * 12
        assert_sound(store, root)
        shutil.rmtree(root)
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.parametrize("seed", seeds(1))
def test_an_index_with_a_bit_flipped_in_use_costs_one_batch_at_most(tmp_path: Path, seed: int) -> None:
    dice, template = rng(seed), tmp_path / "template"
    fill(template)
    bits = index_path(template).stat().st_size * 8
    for bit in [dice.randrange(bits) for _ in range(FLIPS)]:
        root = tmp_path / f"bit {bit}"
        shutil.copytree(template, root)
        store, peer = open_file(root), open_file(root)
        flip(index_path(root), bit)
        batches = [store_chain(one, make_keys(3, f"{n}")) for n, one in enumerate((store, peer, store, peer, store))]
        assert sum(batch != [STORED] * 3 for batch in batches) <= 1, f"bit {bit}: {batches}"
        assert load(store, CHAINS[3]) == [HIT] * 5
        store.backend.usage()
        assert store.backend.delete(CHAINS[4][4:], deadline=soon()) == 1
        store.backend.close()
        peer.backend.close()
        (root / "checked").unlink(missing_ok=True)  # a wrong count of children costs nothing but that page
        assert_sound(open_file(root), root)
        shutil.rmtree(root)


WRONG = {
    "a sum of bytes": "UPDATE totals SET bytes = bytes + 1000000000000",
    "a sum of reserved bytes": "UPDATE totals SET reserved = reserved + 1000000000000",
    "no trigger for removals": "DROP TRIGGER removed",
    "an unknown namespace": "UPDATE pages SET namespace = 99",
}


def spoil(root: Path, statement: str) -> None:
    """Change the index with SQLite, so that it stays a valid database."""
    with contextlib.closing(sqlite3.connect(index_path(root))) as db, db:
        db.execute(statement)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("statement", WRONG.values(), ids=WRONG)
def test_an_index_that_is_valid_and_wrong_costs_one_batch_and_not_the_pages(
    root: Path, statement: str, is_open: bool
) -> None:
    """The next opening mends it before the first batch."""
    store, keys = open_file(root, capacity=20 * PAGE), make_keys(15)
    assert store_chain(store, keys) == [STORED] * 15
    if not is_open:
        store.backend.close()
    spoil(root, statement)
    if not is_open:
        store = open_file(root, capacity=20 * PAGE)
        assert load(store, keys) == [HIT] * 15
    first = store_chain(store, make_keys(10, "first"))
    assert store_chain(store, make_keys(5, "second")) == [STORED] * 5
    assert first == [STORED] * 10 or (is_open and first == [SET_ERROR] * 10)
    assert disk_usage(root)[0] >= 15
    check(store, root)


@pytest.mark.parametrize("seed", seeds(1))
def test_a_journal_with_flipped_bits_costs_at_most_the_index(tmp_path: Path, seed: int) -> None:
    dice, template, killing = rng(seed), tmp_path / "template", Killing()
    fill(template)
    store_chain(store := open_file(template), make_keys(200, "half"))
    store.backend.close()
    killing.run("half a transaction", template)
    killing.close()
    journal = Path(f"{index_path(template)}{JOURNAL}")
    assert journal.read_bytes()[0], "the control: there is something to undo"
    bits = (len(journal.read_bytes().rstrip(b"\0")) + 1) * 8
    for bit in [dice.randrange(512 if number % 3 else bits) for number in range(JOURNAL_FLIPS)]:
        root = tmp_path / f"bit {bit}"
        shutil.copytree(template, root, dirs_exist_ok=True)
        flip(root / journal.name, bit)
        assert_sound(open_file(root), root)
        shutil.rmtree(root)


OBSTACLES = ["directory", "full directory", "link", "fifo", "not readable", "not ours"]


@pytest.mark.parametrize(
    ("suffix", "obstacle"), list(itertools.product(["", JOURNAL], OBSTACLES)), ids=lambda value: value or "index"
)
def test_an_index_that_is_not_a_file_of_ours_is_set_aside_and_never_followed(
    tmp_path: Path, suffix: str, obstacle: str
) -> None:
    root, outside = tmp_path / "s", tmp_path / "outside"
    fill(root)
    path = Path(f"{index_path(root)}{suffix}")
    shutil.copy(path, outside)
    before = outside.read_bytes()
    if obstacle == "not readable":
        path.chmod(0)
    elif obstacle == "not ours":
        if os.geteuid():
            pytest.skip("needs root to give a file away")
        os.chown(path, 12345, 12345)
    else:
        obstruct(path, obstacle, outside)
    raw = open_stored(path=root)
    assert len(list(raw.pages())) == 60
    raw.close()
    assert_sound(open_file(root), root)
    assert outside.read_bytes() == before
    assert obstacle != "full directory" or (path / "mine").read_text() == "keep me"
    assert len([name for name in root.glob("index-*.sqlite") if name.is_file()]) == 1


def test_a_page_from_the_future_is_adopted_as_one_of_today(tmp_path: Path) -> None:
    root, keys = tmp_path / "s", make_keys(3)
    store = open_file(root)
    store_chain(store, keys)
    store.backend.close()
    os.utime(page_path(root, CODEC, keys[0]), (1 << 33, 1 << 33))
    index_path(root).unlink()
    store = open_file(root)
    assert load(store, keys) == [HIT] * 3
    with file_driver(store)._store.transaction(soon()) as index:
        assert max(row.last_use for row in index.all_stored()) < (1 << 33) * 1_000_000
    check(store, root)


def test_a_store_opens_although_the_device_cannot_read_one_page(tmp_path: Path) -> None:
    root, keys = tmp_path / "s", make_keys(3)
    store = open_file(root)
    store_chain(store, keys)
    store.backend.close()
    index_path(root).unlink()
    sick = keys[1].hex()

    def before(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "open" and str(args[0]).endswith(sick):
            raise OSError(errno.EIO, "the device is sick")

    store = open_file(root, system=Faulty(before))
    assert store.backend.usage().pages == 2, "the unreadable page has a row"
    assert store_chain(store, make_keys(2, "new")) == [STORED] * 2
    assert page_path(root, CODEC, keys[1]).exists()


def test_a_path_that_is_too_long_for_an_index_is_rejected_at_once(tmp_path: Path) -> None:
    path = tmp_path
    while len(os.fsencode(path)) < 440:
        path /= "x" * 20
    open_file(path / ("y" * (479 - len(os.fsencode(path))))).backend.close()
    with pytest.raises(BackendUnavailable, match="longer than 480 bytes; use a shorter one"):
        open_file(path / ("y" * 60))


def test_a_failure_while_leftovers_are_swept_is_counted_and_not_raised(root: Path) -> None:
    fill(root)
    store = open_file(root)
    file_driver(store)._store.leftovers.add(f"{'0' * 16}.1")
    db = sqlite3.connect(index_path(root))
    db.execute("DROP TABLE pages")
    db.close()
    store.backend.usage()
    assert store.backend.statistics().errors == {"SQLITE_CORRUPT": 1}
    assert store.backend.usage().pages == 60
    check(store, root)


_CUT_SHORT = """
import os, sys
from pathlib import Path
from hicache_lab.conformance import make_keys, soon, store_chain
from tests.backends._files import check, open_file
root = Path(sys.argv[1])
store = open_file(root)
store_chain(store, make_keys(50, "old"))
for path in root.glob("index-*"):
    os.truncate(path, 0)
store_chain(store, make_keys(5, "lost at most"))
assert set(store_chain(store, make_keys(5, "new"))) == {"stored"}
store.backend.delete(make_keys(5, "old"), deadline=soon())
check(store, root)
store.backend.close()
"""


def test_index_files_truncated_in_use_do_not_kill_the_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CUT_SHORT, str(tmp_path / "s")]
    assert subprocess.run(command, cwd=REPOSITORY, check=False, timeout=300).returncode == 0


def test_the_journal_is_allocated_in_advance_and_truncated_to_its_size(root: Path) -> None:
    store = open_file(root)
    journal = Path(f"{index_path(root)}{JOURNAL}")
    assert (journal.stat().st_size, journal.stat().st_blocks * 512) == (JOURNAL_BYTES, JOURNAL_BYTES)
    keys, writer, longest = make_keys(10_000), f"{'0' * 16}.1", 0
    for reserve in (True, False):
        with file_driver(store)._store.transaction(soon()) as index:
            if reserve:
                index.reserve(NAMESPACE, keys, [None] * len(keys), writer, PAGE, 1)
            else:
                index.release_all(writer)
            longest = max(longest, journal.stat().st_size)
        assert journal.stat().st_size == JOURNAL_BYTES
    assert longest > JOURNAL_BYTES, "the control: one of them was too large for it"
    store.backend.close()
    assert {path.name for path in root.glob("index-*")} == {journal.name, journal.name.removesuffix(JOURNAL)}


# Cycles


def plant(root: Path, key: bytes, parent: bytes) -> None:
    """Write a forged page file whose header names any parent."""
    (frame,) = full_frames(CODEC, [key])
    mark = b"parent!!" * 4
    path = page_path(root, CODEC, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(CODEC.seal(key, frame, parent=mark)).replace(mark, parent, 1))


def cycles(length: int, pages: int) -> list[tuple[bytes, bytes]]:
    """Return keys and parents of pages that form cycles of `length`."""
    keys = make_keys(pages, f"cycles of {length}")
    circles = [keys[first : first + length] for first in range(0, pages, length)]
    return [(key, parent) for circle in circles for key, parent in zip(circle, [circle[-1], *circle], strict=False)]


@pytest.mark.parametrize("length", [2, 3])
def test_a_store_full_of_cycles_takes_new_pages(root: Path, length: int) -> None:
    store = open_file(root, capacity=12 * PAGE)
    for key, parent in cycles(length, 12):
        stored = store.backend.batch_set([key], full_frames(CODEC, [key]), parent=parent, deadline=soon())
        assert stored == [STORED]
    check(store, root)
    assert store_chain(store, make_keys(12, "new")) == [STORED] * 12
    check(store, root)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_forged_pages_in_a_cycle_are_evicted_like_others(root: Path, length: int) -> None:
    open_file(root).backend.close()
    for key, parent in cycles(length, 12):
        plant(root, key, parent)
    store = open_file(root, capacity=12 * PAGE)
    check(store, root)
    assert store_chain(store, make_keys(12, "new")) == [STORED] * 12
    check(store, root)


def test_the_walk_up_a_chain_reads_one_row_per_page_and_is_skipped_for_known_links(tmp_path: Path) -> None:
    """Two engines that store the same chain at once reserve the same links. The control is a new link."""
    store = open_file(tmp_path / "s")
    keys = make_keys(2000)
    with file_driver(store)._store.transaction(soon()) as index:
        index.reserve(NAMESPACE, keys, [None, *keys[:-1]], f"{'0' * 16}.1", PAGE, 1)

        def steps(parent: bytes) -> int:
            taken = 0

            def count() -> int:
                nonlocal taken
                taken += 1
                return 0

            assert index._db is not None
            index._db.set_progress_handler(count, 100)
            index.reserve(NAMESPACE, [keys[1990]], [parent], f"{'0' * 16}.{2 + taken}", PAGE, 1)
            index.release_all(f"{'0' * 16}.2")
            index._db.set_progress_handler(None, 0)
            return taken

        known, new = steps(keys[1989]), steps(keys[1988])
        assert known < 50 and 4 * known < new < 2000, "hundreds of SQLite instructions"
        index.release_all(f"{'0' * 16}.1")


def test_with_a_cycle_in_the_index_a_full_store_takes_no_pages(tmp_path: Path) -> None:
    """The control of the two tests above."""
    store = open_file(tmp_path / "s", capacity=3 * PAGE)
    for key in make_keys(3):
        assert store_chain(store, [key]) == [STORED]
    with file_driver(store)._store.transaction(soon()) as index:
        index._run("UPDATE pages SET parent = key, children = 1")
        with pytest.raises(AssertionError, match="its own ancestor"):
            index.check()
    assert store_chain(store, make_keys(1, "new")) == [REJECTED]


@pytest.mark.parametrize("seed", seeds(3))
def test_the_index_never_holds_a_cycle(tmp_path: Path, seed: int) -> None:
    dice, keys, path = rng(seed), make_keys(8), tmp_path / "index.sqlite"
    path.touch()
    index = Index(str(path), create=True)
    index.begin()
    for number in range(300):
        key, parent = dice.choice(keys), dice.choice([None, *keys])
        action = dice.choice(["reserve", "publish", "add", "drop"])
        if action == "reserve":
            writer = f"{'0' * 16}.{number}"
            index.reserve(NAMESPACE, [key], [parent], writer, PAGE, number)
        elif action == "publish" and index.writers():
            index.publish(dice.choice(index.writers()))
        else:
            index.drop(NAMESPACE, key)
            if action == "add":
                index.add(NAMESPACE, key, parent, PAGE, number)
        index.check()
    index.close()


def is_open(store: FileStore) -> bool:
    return store.root_fd >= 0 and store._index_file.opened is not None


def test_closing_a_store_leaves_a_transaction_in_flight_its_index(tmp_path: Path) -> None:
    """SQLite crashes the process if a connection is closed while another thread runs a statement on it."""
    keys = make_keys(3)
    store_chain(open_file(tmp_path / "s"), keys)
    store = FileStore(tmp_path / "s", create=False)
    entered, closed = threading.Event(), threading.Event()

    def remove() -> None:
        with store.transaction(soon()) as index:
            entered.set()
            assert closed.wait(30.0)
            page_path(tmp_path / "s", CODEC, keys[2]).unlink()
            index.drop(NAMESPACE, keys[2])

    with ThreadPoolExecutor(1) as thread:
        removed = thread.submit(remove)
        assert entered.wait(30.0)
        store.close()
        assert is_open(store)
        closed.set()
        removed.result(30.0)
    assert not is_open(store)
    with pytest.raises(OSError, match="the store is closed"), store.transaction(soon()):
        pass
    with (
        contextlib.closing(FileStore(tmp_path / "s", create=False)) as store,
        store.transaction(soon()) as index,
    ):
        assert {row.key for row in index.all_stored()} == set(keys[:2])
