"""Host pools that several processes share: who creates them, who may open them, and that they are removed."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import CapacityError, InvalidInput, SharedMemoryError
from hicache.frame import FRAME_ALIGN, HEADER_BYTES
from hicache.geometry import KVGeometry, PageShape, Piece
from hicache.shared_memory import CONTROL_BYTES
from hicache.tiers import SharedHostPool
from tests.leftovers import guarded
from tests.tiers._shared_child import GEOMETRY

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
WAIT_S = 60.0
_numbers = itertools.count()


class Child:
    """A process that opens pools. `ask` waits for its answer; `tell` does not."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.tiers._shared_child"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def children() -> Iterator[list[Child]]:
    """Three processes for all tests, because each takes a second to start."""
    started = [Child() for _ in range(2)]
    yield started
    for child in started:
        child.kill()


@pytest.fixture
def doomed() -> Iterator[Child]:
    """A separate process for a test that kills it."""
    child = Child()
    yield child
    child.kill()


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test uses. Its file must be removed at the end of the test."""
    chosen = f"test-{os.getpid()}-{next(_numbers)}"
    yield chosen
    if path_of(chosen).exists():
        gc.collect()  # an exception may still refer to the pool
    left = path_of(chosen).exists()
    path_of(chosen).unlink(missing_ok=True)
    assert not left


def path_of(name: str) -> Path:
    return SHM / f"hicache.{name}"


def open_here(
    name: str, pages: int | Callable[[], int] = 8, processes: int | None = 2, timeout_s: float = WAIT_S, **options: Any
) -> SharedHostPool:
    shape = options.pop("shape", GEOMETRY)
    return SharedHostPool(name, shape, pages, processes=processes, timeout_s=timeout_s, **options)


def test_a_process_reads_the_bytes_that_another_writes(name: str, children: list[Child]) -> None:
    pool = open_here(name, processes=3)
    for child in children:
        assert child.ask("open", name, 8, 3, WAIT_S) == list(pool.identity)
    pages = pool.alloc(3)
    assert pages is not None
    page = int(pages[2])
    children[0].ask("write", name, page, "written elsewhere")
    assert bytes(pool.payload(page)[:17]) == b"written elsewhere"
    pool.payload(7)[:5] = b"hello"
    assert children[1].ask("read", name, 7, 5) == b"hello".hex()
    assert pool.buffer.ctypes.data % FRAME_ALIGN == 0
    assert pool.frame(1)[HEADER_BYTES:].nbytes == pool.frame_bytes - HEADER_BYTES
    for child in children:
        child.ask("drop", name)


@pytest.mark.parametrize("here", range(3))
def test_processes_open_in_any_order_and_the_last_one_removes_the_name(
    name: str, children: list[Child], here: int
) -> None:
    def open_by(child: Child) -> list[int]:
        identity: list[int] = child.ask("open", name, 5, 3, WAIT_S)
        return identity

    def open_by_this_process() -> list[int]:
        pools.append(open_here(name, 5, 3))
        return list(pools[0].identity)

    pools: list[SharedHostPool] = []
    openings = [partial(open_by, child) for child in children]
    openings.insert(here, partial(open_by_this_process))
    found = []
    for opening in openings:
        found.append(opening())
        assert path_of(name).exists() == (len(found) < 3)
    assert found[0] == found[1] == found[2]
    for child in children:
        child.ask("drop", name)


def test_processes_that_open_at_the_same_time_share_one_memory(name: str, children: list[Child]) -> None:
    for child in children:
        child.tell("open", name, 64, 3, WAIT_S)
    pool = open_here(name, 64, 3)
    assert [child.answer() for child in children] == [list(pool.identity)] * 2
    assert not path_of(name).exists()
    for child in children:
        child.ask("drop", name)


def test_a_kept_pool_stays_until_it_is_unlinked(name: str, children: list[Child]) -> None:
    identity = children[0].ask("open", name, 5, None, WAIT_S)
    children[0].ask("write", name, 2, "kept")
    with guarded(name):
        children[0].ask("drop", name)
        pool = open_here(name, 5, None)
    assert list(pool.identity) == identity and bytes(pool.payload(2)[:4]) == b"kept"
    pool.unlink()
    assert not path_of(name).exists()
    other = open_here(name, 5, None)
    assert other.identity != pool.identity
    pool.unlink()
    assert path_of(name).exists(), "the name belongs to another pool by now"
    other.unlink()


def test_processes_that_count_different_pages_share_those_of_the_first(name: str) -> None:
    counted: list[int] = []

    def count(pages: int) -> int:
        counted.append(pages)
        return pages

    first, second, third = (open_here(name, partial(count, pages), processes=3) for pages in (7, 5, 9))
    assert {first.identity, second.identity, third.identity} == {first.identity}
    assert [pool.pages for pool in (first, second, third)] == [7, 7, 7] and counted == [7]
    assert third.capacity_bytes == len(third.memory) == 7 * third.frame_bytes
    assert not path_of(name).exists(), "the last of them removes the name"


def test_a_pool_whose_pages_are_counted_differs_only_by_other_properties(name: str) -> None:
    pool = open_here(name, 8, None)
    with pytest.raises(SharedMemoryError, match="its pages have another shape"):
        open_here(name, lambda: 5, None, shape=PageShape(4, (Piece("kv", GEOMETRY.payload_bytes),)))
    assert open_here(name, lambda: 5, None).pages == 8
    pool.unlink()


def test_pages_are_counted_anew_after_a_leftover_with_other_pages_is_removed(name: str) -> None:
    made = open_here(f"{name}-made")
    path_of(name).touch(0o600)
    path_of(name).write_bytes(made.path.read_bytes())
    pool = open_here(name, lambda: 5, None, shape=PageShape(4, (Piece("kv", GEOMETRY.payload_bytes),)))
    assert pool.pages == 5
    pool.unlink()


def test_a_view_that_outlives_its_pool_does_not_block_other_processes(name: str) -> None:
    pool = open_here(name, 5, None)
    frame = pool.frame(0)
    del pool
    other = open_here(name, 5, None, timeout_s=0)
    frame[:4] = b"late"
    assert bytes(other.frame(0)[:4]) == b"late"
    other.unlink()


def test_an_abandoned_start_leaves_no_file(name: str) -> None:
    pool = open_here(name, processes=3)
    assert path_of(name).stat().st_mode & 0o7777 == 0o600
    del pool
    gc.collect()
    assert not path_of(name).exists()


MISFITS: dict[str, tuple[Callable[[str], SharedHostPool], str]] = {
    "pages": (lambda name: open_here(name, 9), "it has 8 pages, not 9"),
    "processes": (lambda name: open_here(name, processes=3), "it is for 2 processes, not 3"),
    "kept": (lambda name: open_here(name, processes=None), "it is for 2 processes, not any number"),
    "shape": (
        lambda name: open_here(name, shape=KVGeometry(layers=3, heads=1, head_dim=16, page_size=8)),
        "its pages have another shape",
    ),
    "pieces": (
        lambda name: open_here(name, shape=PageShape(4, (Piece("kv", GEOMETRY.payload_bytes),))),
        "its pages have another shape",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_pool_in_use_that_differs_is_rejected_with_the_difference(name: str, misfit: str) -> None:
    pool = open_here(name)
    opening, message = MISFITS[misfit]
    with pytest.raises(SharedMemoryError, match=message):
        opening(name)
    assert open_here(name).identity == pool.identity, "the refused process does not count"


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_leftover_that_differs_is_replaced(name: str, misfit: str) -> None:
    made = open_here(f"{name}-made")
    path_of(name).touch(0o600)
    path_of(name).write_bytes(made.path.read_bytes())  # as if all processes that opened it were killed
    identity = path_of(name).stat().st_dev, path_of(name).stat().st_ino
    opening, _ = MISFITS[misfit]
    pool = opening(name)
    assert pool.identity != identity
    pool.unlink()


def test_a_process_that_died_after_opening_does_not_count(name: str, doomed: Child) -> None:
    identity = doomed.ask("open", name, 8, 2, WAIT_S)
    with guarded(name):
        doomed.kill()
        first = open_here(name)
    assert list(first.identity) == identity and path_of(name).exists()
    assert open_here(name).identity == first.identity
    assert not path_of(name).exists()


def test_an_open_waits_for_half_created_memory_and_replaces_it_if_the_creator_dies(name: str, doomed: Child) -> None:
    doomed.ask("stall", CONTROL_BYTES)
    doomed.tell("open", name, 8, 2, WAIT_S)
    assert doomed.answer() == "stalled"
    assert path_of(name).stat().st_size > 0
    with pytest.raises(SharedMemoryError, match="not ready in time"):
        open_here(name, timeout_s=0.05)
    with guarded(name):
        doomed.kill()
        assert path_of(name).exists()
        first = open_here(name, timeout_s=0)
    assert open_here(name, timeout_s=0).identity == first.identity


def test_an_empty_file_counts_as_an_interrupted_creation(name: str) -> None:
    path_of(name).touch(0o600)
    assert open_here(name).identity == open_here(name).identity


def test_a_file_system_that_is_too_small_is_an_error_with_the_numbers(name: str) -> None:
    system = os.statvfs(SHM)
    pages = system.f_blocks * system.f_frsize // 4096 + 1
    with pytest.raises(CapacityError, match=r"need \d+ bytes in /dev/shm, but only \d+ are free"):
        open_here(name, pages)
    assert not path_of(name).exists()


def test_a_file_system_without_a_limit_does_not_count_as_full() -> None:
    code = (
        "from tests.tiers._shared_child import open_pool; "
        "assert open_pool('unlimited', 2, None, 9.0)"
    )
    script = 'mount -t tmpfs -o size=0 none /dev/shm || exit 77; exec "$@"'
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("only root can mount a file system")
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this system does not let a process mount a file system")
    assert result.returncode == 0, result.stderr
    assert not path_of("unlimited").exists()


def test_a_failed_allocation_leaves_no_file(name: str, children: list[Child]) -> None:
    children[0].ask("limit", CONTROL_BYTES + 4096)
    refused = children[0].ask("open", name, 2, 2, WAIT_S)
    children[0].ask("limit", resource.RLIM_INFINITY)
    assert refused.startswith("CapacityError: shared host pool: 2 pages of ")
    assert not path_of(name).exists()


@pytest.mark.parametrize("processes", [None, 1, 2])
def test_a_failed_mapping_leaves_no_file(
    name: str, children: list[Child], processes: int | None
) -> None:
    children[0].ask("limit memory", 16 << 20)
    refused = children[0].ask("open", name, 8192, processes, WAIT_S)
    children[0].ask("limit memory", None)
    assert refused.startswith("CapacityError: ") and "cannot be mapped" in refused
    assert not path_of(name).exists()


def _link(path: Path, aside: Path) -> None:
    path.symlink_to(aside)


def _open_to_all(path: Path, _: Path) -> None:
    path.touch()
    path.chmod(0o644)


def _of_another_user(path: Path, _: Path) -> None:
    path.touch(0o600)
    os.chown(path, 12345, -1)


def _other_content(path: Path, _: Path) -> None:
    path.touch(0o600)
    path.write_bytes(b"notes" * 99)


FOREIGN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "link": (_link, "is not a regular file"),
    "directory": (lambda path, _: path.mkdir(0o600), "is not a regular file"),
    "pipe": (lambda path, _: os.mkfifo(path, 0o600), "is not a regular file"),
    "mode": (_open_to_all, "has mode 0644, not 0600"),
    "owner": (_of_another_user, "belongs to user 12345"),
    "content": (_other_content, "was not created by HiCache"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_rejected_and_not_changed(name: str, tmp_path: Path, kind: str) -> None:
    if kind == "owner" and os.geteuid():
        pytest.skip("only root can give a file away")
    make, message = FOREIGN[kind]
    aside = tmp_path / "aside"
    aside.write_bytes(b"precious")
    path = path_of(name)
    make(path, aside)
    before = path.lstat()
    with pytest.raises(SharedMemoryError, match=message):
        open_here(name, timeout_s=0)
    after = path.lstat()
    assert (before.st_ino, before.st_mode, before.st_size) == (after.st_ino, after.st_mode, after.st_size)
    assert aside.read_bytes() == b"precious"
    path.rmdir() if kind == "directory" else path.unlink()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"name": ""}, "letters, digits"),
        ({"name": "../x"}, "letters, digits"),
        ({"name": "x" * 129}, "letters, digits"),
        ({"name": "x\n"}, "letters, digits"),
        ({"name": 5}, "pass a str"),
        ({"pages": 0}, "pages: 0 is not valid"),
        ({"processes": 0}, "processes: 0 is not valid"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_file_is_created(name: str, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_here(**{"name": name} | bad)


def test_a_forked_child_that_ends_does_not_affect_the_pool(name: str, children: list[Child]) -> None:
    identity = children[0].ask("open", name, 8, 2, WAIT_S)
    assert children[0].ask("drop in a fork", name) == 0
    assert path_of(name).exists()
    assert list(open_here(name).identity) == identity
    children[0].ask("drop", name)
