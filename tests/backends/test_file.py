"""The file backend against the contract, and its own behaviour: limits, restarts, sharing between processes."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file.driver import USES_FLUSH_S
from hicache.backends.file.system import System
from hicache.frame import FrameCodec
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    DriverContract,
    OpenStore,
    SampleContract,
    Subject,
    exists,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds

from . import _files
from ._files import (
    CODEC,
    FORMS,
    PAGE,
    Faulty,
    check,
    disk_usage,
    file_driver,
    open_file,
    page_path,
    temporary_files,
)

REJECTED = SetOutcome.REJECTED
REPOSITORY = Path(__file__).resolve().parents[2]


class TestFileBackend(DriverContract):
    machine_examples = 40

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: open_file(tmp_path / "store", codec)

class TestFileBackendDirect(SampleContract):
    """With direct I/O where the file system has it, synchronous, and with one thread."""

    test_pages_of_any_size_come_back = DriverContract.test_pages_of_any_size_come_back
    test_no_byte_outside_a_frame_is_written = DriverContract.test_no_byte_outside_a_frame_is_written

    @pytest.fixture
    def open_store(self, disk_path: Path) -> OpenStore:
        return lambda codec: open_file(disk_path / "store", codec, direct_io=True, sync=True, io_threads=1)

    def test_statistics_count_outcomes_and_bytes(self, store: Subject) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        load(store, keys)
        # The contract's frames are not aligned. Direct I/O refuses them, which is counted, but they are served.
        assert set(store.backend.statistics().errors) <= {"direct_io_refused"}
        assert store.backend.statistics().gets[HIT] == 2


# Limits


def test_pages_of_an_older_epoch_make_room(tmp_path: Path) -> None:
    older = FrameCodec(b"o" * 32, PAYLOAD_BYTES)
    store = open_file(tmp_path / "s", older, capacity=6 * PAGE)
    store_chain(store, make_keys(6))
    store.backend.close()
    store = open_file(tmp_path / "s", capacity=6 * PAGE)
    assert store.backend.usage().pages == 6
    assert store_chain(store, make_keys(6)) == [STORED] * 6
    assert exists(store, make_keys(6)) == 6
    check(store, tmp_path / "s")
    store.backend.close()
    open_file(tmp_path / "s").backend.close()
    assert not (tmp_path / "s" / older.namespace.hex()).exists(), "an empty namespace leaves no directories"


def test_a_smaller_capacity_applies_right_after_a_restart(tmp_path: Path) -> None:
    store = open_file(tmp_path / "s")
    keys = make_keys(10)
    store_chain(store, keys)
    store.backend.close()
    store = open_file(tmp_path / "s", capacity=4 * PAGE)
    assert disk_usage(tmp_path / "s") == (4, 4 * PAGE)
    assert exists(store, keys) == 4


def test_a_page_that_cannot_be_evicted_does_not_block_other_evictions(root: Path) -> None:
    stuck, full = make_keys(1, "stuck")[0], make_keys(1, "full")[0]

    def fault(name: str, number: int, args: tuple[object, ...]) -> None:
        if name == "unlink" and str(args[0]).endswith(stuck.hex()):
            raise OSError(errno.EIO, "broken")

    store = open_file(root, system=Faulty(fault), capacity=4 * PAGE)
    for key in (stuck, full, *make_keys(2)):
        store_chain(store, [key])
    path = page_path(root, CODEC, full)
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("keep me")
    assert store_chain(store, make_keys(2, "new")) == [STORED, STORED]
    assert load(store, [stuck, *make_keys(2), *make_keys(2, "new")]) == [HIT, MISS, HIT, HIT, HIT]
    assert (path / "mine").exists()
    assert store.backend.statistics().errors == {"EIO": 1}


class _SmallDisk(System):
    """A file system of `size_bytes` that holds only this store's pages."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        self.root, self.size_bytes = root, size_bytes

    def statvfs(self, fd: int) -> os.statvfs_result:
        free = (self.size_bytes - sum(disk_usage(self.root)[1:])) // 512
        return os.statvfs_result((512, 512, self.size_bytes // 512, free, free, 0, 0, 0, 0, 255))


def test_the_free_space_floor_is_kept_by_evicting_then_by_rejecting(tmp_path: Path) -> None:
    root, slack = tmp_path / "s", 1 << 20
    disk = _SmallDisk(root, 20 * PAGE + slack)
    store = open_file(root, system=disk, free_space_floor=10 * PAGE)
    old, new = make_keys(8, "old"), make_keys(8, "new")
    assert store_chain(store, old) == [STORED] * 8
    assert store_chain(store, new) == [STORED] * 8
    assert disk_usage(root)[0] == 10
    assert (exists(store, old), exists(store, new)) == (2, 8)
    disk.size_bytes -= 8 * PAGE  # other files fill the disk
    assert store_chain(store, make_keys(4, "newest")) == [STORED, STORED, REJECTED, REJECTED]
    assert disk_usage(root)[0] == 2
    check(store, root)
    store.backend.close()
    disk.size_bytes -= PAGE
    store = open_file(root, system=disk, free_space_floor=10 * PAGE)
    assert disk_usage(root)[0] == 1


@pytest.mark.parametrize("form", ["plain", "zstd+gcm"])
def test_threads_never_exceed_the_capacity(tmp_path: Path, form: str) -> None:
    root, capacity = tmp_path / "s", 12 * PAGE
    store = open_file(root, FORMS[form], capacity=capacity)
    done = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not done.wait(0.001):  # a pause, so that the watcher does not hold the lock all the time
            seen.append(_files.bytes_on_disk(root))

    def use(number: int) -> None:
        dice = rng(number)
        for turn in range(25):
            keys = make_keys(dice.randrange(1, 7), f"{number % 2} {turn % 7}")
            store_chain(store, keys)
            load(store, keys)

    watcher = threading.Thread(target=watch)
    users = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in (watcher, *users):
        thread.start()
    for thread in users:
        thread.join()
    done.set()
    watcher.join()
    assert max(seen) <= capacity
    check(store, root)


@pytest.mark.parametrize(("form", "kept"), [("plain", 0.0), ("zstd", 0.0), ("plain", 0.8)])
@pytest.mark.parametrize("seed", seeds(2))
def test_after_every_step_of_random_use_the_index_matches_the_disk(
    tmp_path: Path, form: str, kept: float, seed: int
) -> None:
    """`kept` is the share of victims that an adaptive policy would keep."""
    dice, root, codec = rng(seed), tmp_path / "s", FORMS[form]

    def opened() -> Subject:
        store = open_file(root, codec, capacity=10 * PAGE)
        file_driver(store)._capacity.keeps = lambda name, parent_of: dice.random() < kept
        return store

    store = opened()
    chains = [make_keys(6, f"chain {number}") for number in range(5)]
    for step in range(250):
        chain, first = dice.choice(chains), dice.randrange(6)
        action = dice.randrange(8)
        if action < 4:
            outcomes = store_chain(store, chain[first:], chain[first - 1] if first else None)
            assert set(outcomes) <= {STORED, PRESENT, REJECTED}
        elif action < 6:
            load(store, chain)
        elif action == 6:
            store.backend.delete([chain[first]], deadline=soon())
        elif step % 5 == 0:
            store.backend.close()
            store = opened()
        check(store, root)
        assert store.backend.usage().bytes <= 10 * PAGE


# Restarts


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    store = open_file(tmp_path / "s", capacity=8 * PAGE)
    first, second = make_keys(4, "first"), make_keys(4, "second")
    store_chain(store, first)
    store_chain(store, second)
    assert load(store, first) == [HIT] * 4
    store.backend.close()
    store = open_file(tmp_path / "s", capacity=8 * PAGE)
    store_chain(store, make_keys(4, "third"))
    assert (exists(store, first), exists(store, second)) == (4, 0)


@pytest.mark.parametrize(
    "damage", ["deleted", "emptied", "overwritten", "middle overwritten", "two of them", "version"]
)
def test_a_lost_or_damaged_index_is_rebuilt_from_the_pages(root: Path, damage: str) -> None:
    store = open_file(root)
    old, new = make_keys(5, "old"), make_keys(3, "new")
    store_chain(store, old)
    store_chain(store, new)
    store.backend.close()
    (index,) = root.glob("index-*.sqlite")
    raw = index.read_bytes()
    if damage == "deleted":
        index.unlink()
    elif damage == "emptied":
        index.write_bytes(b"")
    elif damage == "overwritten":
        index.write_bytes(b"nonsense" * 1000)
    elif damage == "middle overwritten":
        index.write_bytes(raw[:5000] + b"\xa5" * (len(raw) - 5000))
    elif damage == "two of them":
        (root / "index-00000000.sqlite").write_bytes(raw)
    else:
        index.write_bytes(raw[:60] + b"\0\0\0\x63" + raw[64:])
    for position, key in enumerate(old + new):
        os.utime(page_path(root, CODEC, key), (1e9 + position, 1e9 + position))
    store = open_file(root, capacity=8 * PAGE)
    assert (exists(store, old), exists(store, new)) == (5, 3)
    check(store, root)
    # Parents came back from the headers, so tails go before heads; recency came back from the files.
    store_chain(store, make_keys(2, "newest"))
    assert (exists(store, old), exists(store, new)) == (3, 3)
    assert load(store, old + new) == [HIT] * 3 + [MISS] * 2 + [HIT] * 3


def test_an_index_that_vanishes_in_use_is_rebuilt(root: Path) -> None:
    store, other = open_file(root), open_file(root)
    store_chain(store, make_keys(3))
    for path in _files.index_files(root):
        path.unlink()
    assert store_chain(store, make_keys(3, "more")) == [STORED] * 3
    assert other.backend.usage().pages == 6
    check(other, root)
    check(store, root)
    store.backend.close()
    check(other, root)


def test_rows_without_files_and_files_without_rows_are_reconciled(root: Path) -> None:
    store = open_file(root)
    keys = make_keys(6)
    store_chain(store, keys)
    store.backend.close()
    page_path(root, CODEC, keys[4]).unlink()
    stray = make_keys(1, "stray")[0]
    (frame,) = full_frames(CODEC, [stray])
    CODEC.seal(stray, frame)
    for key, data in ((stray, bytes(frame)), (make_keys(1, "liar")[0], bytes(frame)), (b"j" * 32, b"junk")):
        path = page_path(root, CODEC, key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    page_path(root, CODEC, keys[5]).write_bytes(b"short")
    store = open_file(root)
    assert load(store, [*keys[:4], stray]) == [HIT] * 5
    # A file that was changed in place counts until it is read.
    assert store.backend.usage().pages == 6 and load(store, keys[4:]) == [MISS, CORRUPT]
    assert store.backend.usage().pages == 5
    check(store, root)


# Several processes

_WRITER = """
import random, sys
from collections import Counter
from pathlib import Path
from hicache_lab.conformance import load, make_keys, store_chain
from tests.backends._files import PAGE, open_file

root, number, capacity, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dice = random.Random(number)
store = open_file(root, capacity=capacity)
errors = Counter()
corrupt = Counter()

def close():
    found = store.backend.statistics()
    errors.update(found.errors)
    corrupt.update(found.corrupt)
    store.backend.close()

for turn in range(rounds):
    keys = make_keys(dice.randrange(1, 9), f"chain {dice.randrange(6)}")
    store_chain(store, keys)
    load(store, keys)
    if dice.randrange(10) == 0:
        close()
        store = open_file(root, capacity=capacity)
is_within = store.backend.usage().bytes <= capacity
close()
print(is_within, dict(errors), dict(corrupt))
"""


def test_processes_share_one_store_within_its_capacity(tmp_path: Path) -> None:
    root, capacity = tmp_path / "s", 16 * PAGE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(root), str(number), str(capacity), "40"],
            cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]
    largest = 0
    pause, deadline = threading.Event(), time.monotonic() + 120
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < deadline
        pause.wait(0.001)  # so that this loop does not hold the lock all the time
        largest = max(largest, _files.bytes_on_disk(root))
    outputs = [process.communicate()[0].strip() for process in processes]
    assert outputs == ["True {} {}"] * 3
    assert 0 < largest <= capacity
    store = open_file(root, capacity=capacity)
    check(store, root)
    store.backend.close()
    assert temporary_files(root) == []


@pytest.mark.parametrize("look", [1, 2])
def test_a_store_that_closes_while_another_evicts_costs_that_one_nothing(tmp_path: Path, look: int) -> None:
    """Closing needs no lock, so its owner file may vanish before the other reads it, and before it tries its lock."""
    root, capacity = tmp_path / "s", 4 * PAGE
    looks: list[str] = []

    def close(name: str, number: int, args: tuple[str, ...]) -> None:
        if name == "open" and args[0] == owner:
            looks.append(owner)
            if len(looks) == look:
                file_driver(other)._store.close()

    system = Faulty(close)
    system.armed = False
    one = open_file(root, capacity=capacity, system=system)
    assert store_chain(one, make_keys(4)) == [STORED] * 4
    other = open_file(root, capacity=capacity)
    owner = f"{file_driver(other)._store.owner}.alive"
    system.armed = True
    assert store_chain(one, make_keys(2, "new")) == [STORED] * 2
    assert len(looks) == look and one.backend.statistics().errors == {}


def test_while_the_store_is_locked_few_reads_wait_to_note_uses(tmp_path: Path) -> None:
    taken: list[str] = []
    clock = ManualClock()
    one = open_file(tmp_path / "s")
    two = open_file(tmp_path / "s", system=Faulty(lambda name, *_: taken.append(name)), clock=clock)
    keys = make_keys(2)
    store_chain(one, keys)
    file_driver(two)._uses_since = -math.inf  # the use of some page waits to be written
    with file_driver(one)._store.transaction(soon()):
        waited = []
        for number in range(6):
            taken.clear()
            assert load(two, keys) == [HIT] * 2
            waited.append("flock" in taken)
            clock.advance(USES_FLUSH_S if number == 2 else 0.0)
        assert waited == [True, False, False, True, False, False]
    file_driver(two)._flush_uses(soon())
    assert file_driver(two)._uses == {}


def test_a_locked_store_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    one, two = open_file(tmp_path / "s"), open_file(tmp_path / "s")
    keys = make_keys(2)
    store_chain(one, keys)
    with file_driver(one)._store.transaction(soon()):
        frames = full_frames(CODEC, make_keys(2, "new"))
        outcomes = two.backend.batch_set(
            make_keys(2, "new"), frames, parent=None, deadline=time.monotonic() + 0.05
        )
        assert outcomes == [SetOutcome.ERROR] * 2
        assert load(two, keys) == [HIT, HIT], "reading needs no lock"
    # On a busy machine the deadline may pass before the lock is requested.
    assert two.backend.statistics().errors in ({"ETIMEDOUT": 2}, {"deadline": 2})
    assert store_chain(two, make_keys(2, "new")) == [STORED] * 2
    check(two, tmp_path / "s")


# Removal of a namespace


@pytest.mark.parametrize("index", ["sound", "lost", "damaged"])
def test_clearing_leaves_no_rows_and_no_files_of_the_namespace(root: Path, index: str) -> None:
    ours, theirs = open_file(root), open_file(root, FrameCodec(b"o" * 32, PAYLOAD_BYTES))
    keys = make_keys(1200)  # more than one removal takes
    store_chain(ours, keys)
    store_chain(theirs, keys[:3])
    for key in keys[:2]:
        page_path(root, CODEC, key).unlink()  # by hand: rows without files
    page_path(root, CODEC, keys[2]).write_bytes(b"torn")
    if index != "sound":
        for path in _files.index_files(root):
            path.unlink() if index == "lost" else path.write_bytes(b"nonsense" * 1000)
    # The torn file is not a page for `clear` or `delete`; the next opening that compares all files removes it.
    assert ours.backend.clear(deadline=soon()) == len(keys) - 3
    assert load(theirs, keys[:3]) == [HIT] * 3
    assert disk_usage(root)[0] <= 4
    usage = ours.backend.usage()
    assert (usage.pages, usage.bytes) == (3, 3 * PAGE)
    file_driver(ours).check()
    ours.backend.close()
    theirs.backend.close()
    (root / "checked").unlink()
    open_file(root).backend.close()
    assert disk_usage(root)[0] == 3


def test_a_key_that_cannot_be_looked_up_counts_as_not_stored_and_as_an_error(tmp_path: Path) -> None:
    keys = make_keys(4)

    def fault(name: str, number: int, args: tuple[object, ...]) -> None:
        if name == "lstat" and str(args[0]).endswith(keys[1].hex()):
            raise OSError(errno.EIO, "broken")

    system = Faulty(fault)
    system.armed = False
    store = open_file(tmp_path / "s", system=system)
    store_chain(store, keys[:3])
    system.armed = True
    assert store.backend.batch_has(keys, deadline=soon()) == [True, False, True, False]
    assert store.backend.statistics().errors == {"EIO": 1}
    assert exists(store, keys) == 1
    assert store.backend.statistics().errors == {"EIO": 2}


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1, 2 * PAGE, 1 << 40])
def test_a_file_of_a_length_that_no_page_has_is_not_read_and_is_replaced(tmp_path: Path, size: int) -> None:
    root, keys = tmp_path / "s", make_keys(2)
    store = open_file(root)
    store_chain(store, keys)
    for key in keys:
        os.truncate(page_path(root, CODEC, key), size)
    assert store.backend.batch_has(keys, deadline=soon()) == [False, False]
    assert store_chain(store, keys[:1]) == [STORED]
    frames = [memoryview(bytearray(b"\xee" * PAGE)) for _ in keys]
    assert store.backend.batch_get(keys, frames, deadline=soon()) == [HIT, CORRUPT]
    assert bytes(frames[1]) == b"\xee" * PAGE
    assert dict(store.backend.statistics().corrupt) == {"size": 1}
    assert store.read(keys[1]) is None


def test_a_page_used_again_counts_as_used_then_and_not_later(tmp_path: Path) -> None:
    clock = ManualClock()
    store = open_file(tmp_path / "s", capacity=40 * PAGE, clock=clock)
    used, fresh = make_keys(3, "used"), [make_keys(1, f"fresh {number}") for number in range(80)]
    store_chain(store, used)
    for number, keys in enumerate(fresh):
        clock.advance(0.001)
        assert store_chain(store, keys) == [STORED]
        if number == 30:
            assert load(store, used) == [HIT] * 3
        if number == 60:
            assert exists(store, used) == 3, "the used chain was evicted before pages that were used earlier"
    assert exists(store, used) == 0, "the used chain outlived pages that were used later"
