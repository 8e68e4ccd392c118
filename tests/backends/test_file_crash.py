"""kill -9 at any point leaves whole pages or misses, within the limits, without leaks.

`SOAK_FACTOR` multiplies the kills at random moments; the kills at call boundaries are the same each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    PRESENT,
    STORED,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.seeds import IS_SOAK, rng, seeds

from ._crash_child import CAPACITY_PAGES, HALF_PAGES, MARK_US
from ._files import (
    CODEC,
    FORMS,
    PAGE,
    bytes_on_disk,
    disk_usage,
    file_driver,
    open_file,
    open_stored,
    page_files,
    page_path,
    reserved_bytes,
    temporary_files,
)

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]
CAPACITY = CAPACITY_PAGES * PAGE
RANDOM_KILLS = 20
KILLED = -signal.SIGKILL


class Killing:
    """The helper process; `run` runs a scenario in a child and returns how it ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends._crash_child"],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def run(
        self, scenario: str, root: Path, kill_at: int = 0, kill_after_s: float | None = None, form: str = "plain"
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {
            "scenario": scenario, "root": str(root), "kill_at": kill_at, "kill_after_s": kill_after_s, "form": form
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def killing() -> Iterator[Killing]:
    helper = Killing()
    yield helper
    helper.close()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return make_template(tmp_path / "template", "plain")


def make_template(root: Path, form: str) -> Path:
    """Make a store with four pages and possible leftovers of earlier crashes."""
    codec = FORMS[form]
    store = open_file(root, codec)
    store_chain(store, make_keys(4, "old"))
    store_chain(store, make_keys(2, "gone"))
    store.backend.close()
    page_path(root, CODEC, make_keys(2, "gone")[1]).unlink()
    page_path(root, CODEC, make_keys(4, "old")[3]).write_bytes(b"torn")
    (stray,) = make_keys(1, "stray")
    (frame,) = full_frames(codec, [stray])
    page_path(root, CODEC, stray).parent.mkdir(exist_ok=True)
    page_path(root, CODEC, stray).write_bytes(codec.seal(stray, frame))
    (root / "tmp" / "0123456789abcdef.7").write_bytes(bytes(100))
    (root / "tmp" / "0123456789abcdef.alive").write_bytes(b"")
    return root


def verify(
    root: Path, told: dict[str, int], what: str, others: Sequence[str] = (), form: str = "plain"
) -> None:
    """Check the store after a kill, before and after it is opened again. `others` are owner files of live processes."""
    with_limit = "old" not in told
    if with_limit:
        assert bytes_on_disk(root) - 100 <= CAPACITY, what
    store = open_file(root, FORMS[form], capacity=CAPACITY if with_limit else None)
    file_driver(store).check()
    usage = store.backend.usage()
    assert (usage.pages, usage.bytes) == disk_usage(root), what
    assert reserved_bytes(root) == 0, what
    assert set(temporary_files(root)) == {f"{file_driver(store)._store.owner}.alive", *others}, what
    for chain in ("old", "gone", "stray", "one", "two", *(f"chain {n}" for n in range(7))):
        assert CORRUPT not in load(store, make_keys(5, chain)), what
    for chain, pages in told.items():
        if chain in ("one", "two"):
            assert load(store, make_keys(pages, chain)) == [HIT] * pages, what
    assert store_chain(store, make_keys(2, "after"))[0] in ("stored", "present")
    store.backend.close()
    assert temporary_files(root) == list(others)


# In parts, so that each test stays far below its time limit on a busy machine. A soak has all of them.
PARTS = 4
SOME = range(PARTS) if IS_SOAK else (0, 2)


@pytest.mark.parametrize(
    ("scenario", "form", "first"),
    # The calls are the same for every encoding, so some of them are enough for the second one.
    [*((scenario, "plain", 1 + part) for scenario in ("write", "evict", "sweep") for part in SOME),
     ("evict", "zstd+gcm", 1)],
)
def test_a_kill_at_any_call_leaves_whole_pages_or_misses(
    killing: Killing, tmp_path: Path, scenario: str, form: str, first: int
) -> None:
    template, root = make_template(tmp_path / "template", form), tmp_path / "s"
    shutil.copytree(template, root)
    whole = killing.run(scenario, root, form=form)
    assert whole["status"] == 0
    calls = whole["told"].pop("calls")
    assert calls > 30
    killed, moments = 0, range(first, calls + 1, PARTS)
    for kill_at in moments:
        shutil.rmtree(root)
        shutil.copytree(template, root)
        ended = killing.run(scenario, root, kill_at=kill_at, form=form)
        # Threads change the number of calls by a few, so that the last kills may come too late.
        assert ended["status"] in (KILLED, 0)
        killed += ended["status"] == KILLED
        ended["told"].pop("calls", None)
        verify(root, ended["told"], f"killed before call {kill_at} of {calls}", form=form)
    print(f"{killed} kills at calls")
    assert killed >= len(moments) - 3


@pytest.mark.parametrize("seed", seeds(1))
def test_kills_at_random_moments_leave_whole_pages_or_misses(
    killing: Killing, template: Path, root: Path, seed: int
) -> None:
    dice = rng(seed)
    shutil.copytree(template, root)
    survivor = open_file(root, capacity=CAPACITY)
    owner = f"{file_driver(survivor)._store.owner}.alive"
    for number in range(RANDOM_KILLS):
        # One store for all kills, and a process that stays alive without reopening it.
        ended = killing.run("forever", root, kill_after_s=dice.uniform(0.002, 0.06))
        assert ended["status"] == KILLED
        keys = make_keys(3, f"survivor {number % 3}")
        assert set(store_chain(survivor, keys)) <= {STORED, PRESENT}
        assert load(survivor, keys) == [HIT] * 3
        verify(root, {}, f"random kill {number}", [owner])
    survivor.backend.close()
    assert temporary_files(root) == []


@pytest.mark.parametrize("form", ["plain", "zstd"])
def test_a_live_process_reclaims_the_room_of_a_dead_one(killing: Killing, tmp_path: Path, form: str) -> None:
    """A process that never reopens the store must be able to use the room that a killed process had reserved."""
    root, size = tmp_path / "s", PAGE if form == "plain" else 4096
    # Room is reserved for whole frames, so four shorter pages need it for the last one.
    store = open_file(root, FORMS[form], capacity=4 * PAGE)
    whole = killing.run("write", root, form=form)["told"]["calls"]
    for kill_at in range(1, whole, 3 if form == "plain" else 9):
        store.backend.delete([*make_keys(3, "one"), *make_keys(3, "two"), *make_keys(4, "mine")], deadline=soon())
        killing.run("write", root, kill_at=kill_at, form=form)
        assert store_chain(store, make_keys(4, "mine")) == [STORED] * 4
        usage = store.backend.usage()
        assert (usage.pages, usage.bytes) == (4, 4 * size)
        assert load(store, make_keys(4, "mine")) == [HIT] * 4
        assert load(store, make_keys(3, "one")) == [MISS] * 3
    store.backend.close()
    # Owner files stay until the next opening, and so do temporary files if room was never short.
    open_file(root).backend.close()
    assert temporary_files(root) == []


def test_without_reopening_a_kill_leaves_leftovers(killing: Killing, template: Path, root: Path) -> None:
    """The control of the tests above: the kills do interrupt work."""
    shutil.copytree(template, root)
    calls = killing.run("write", root)["told"]["calls"]
    leftovers = 0
    for kill_at in range(1, calls, 4):
        shutil.rmtree(root)
        shutil.copytree(template, root)
        killing.run("write", root, kill_at=kill_at)
        leftovers += any(name.partition(".")[2].isdigit() for name in temporary_files(root))
    assert leftovers > 2


@pytest.mark.parametrize("next_one", ["an engine that lives", "an engine that starts", "a command that only looks"])
def test_a_transaction_interrupted_by_a_kill_is_undone_by(killing: Killing, root: Path, next_one: str) -> None:
    store = open_file(root)
    assert store_chain(store, make_keys(HALF_PAGES, "half")) == [STORED] * HALF_PAGES
    (path,) = root.glob("index-*.sqlite")
    before = path.read_bytes()
    assert killing.run("half a transaction", root)["status"] == KILLED
    assert path.read_bytes() != before, "the control: half of it is in the index"
    if next_one == "an engine that starts":
        store.backend.close()
        store = open_file(root)
    if next_one != "a command that only looks":
        assert store_chain(store, make_keys(2, "next")) == [STORED] * 2
        file_driver(store).check()
        assert store.backend.usage().pages == HALF_PAGES + 2
    for page in page_files(root):
        os.utime(page, (1e9, 1e9))
    with contextlib.closing(open_stored(root)) as raw:
        uses = [page.used_s or 0.0 for page in raw.pages()]
    assert len(uses) >= HALF_PAGES and all(1.1e9 < used_s < MARK_US / 1e6 for used_s in uses), "not from the index"
    assert list(root.glob("index-*.sqlite")) == [path]
