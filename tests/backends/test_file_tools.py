"""Inspect, scrub and purge: from the files alone, beside live engines, without touching foreign files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends.file.inspection import FileInspection
from hicache.backends.stored import StoredPages
from hicache.backends.tools.verify import NO_KEYS, inspect_page, tag_name, verify_stored
from hicache.errors import BackendUnavailable
from hicache.frame import HEADER_BYTES, FrameCodec, TagKind
from hicache_lab.conformance import (
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    Subject,
    load,
    make_keys,
    store_chain,
)

from . import _files
from ._files import (
    CODEC,
    PAGE,
    Faulty,
    check,
    disk_usage,
    file_options,
    open_file,
    page_files,
    page_path,
    purge,
    verify,
)


def test_inspect_reads_a_page_from_its_file_alone(root: Path) -> None:
    store = open_file(root)
    keys = make_keys(2)
    store_chain(store, keys)
    report = inspect_page(page_path(root, CODEC, keys[1]))
    header = report.header
    assert header is not None and (report.damage, report.is_proved, tag_name(header)) == (None, True, "XXH3_128")
    assert (header.page_key, header.parent_key) == (keys[1], keys[0])
    assert (header.namespace, header.payload_bytes) == (NAMESPACE, PAYLOAD_BYTES)


def test_a_page_under_a_wrong_name_is_still_checked(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    (key,) = make_keys(1)
    store_chain(store, [key])
    raw = page_path(root, CODEC, key).read_bytes()
    copy = tmp_path / "copy"
    copy.write_bytes(raw)
    report = inspect_page(copy)
    assert (report.damage, report.note) == ("page_key", "the name of the file is not the key of the page")
    copy.write_bytes(raw[:1000] + b"\xff" + raw[1001:])
    report = inspect_page(copy)
    assert (report.damage, report.note) == ("tag", "the name of the file is not the key of the page")


def test_inspect_names_the_damage(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    keys = make_keys(2)
    store_chain(store, keys)
    path, other = (page_path(root, CODEC, key) for key in keys)
    raw = path.read_bytes()
    for damage, data in (
        ("tag", raw[:HEADER_BYTES] + b"\xff" + raw[HEADER_BYTES + 1 :]), ("size", raw[:-1]), ("not_a_frame", b""),
        ("page_key", other.read_bytes()), ("version", raw[:36] + b"\x09" + raw[37:]),
        ("tag_kind", raw[:38] + b"\x09" + raw[39:]), ("size", raw[:48] + b"\xff" * 8 + raw[56:]),
    ):
        path.write_bytes(data)
        assert inspect_page(path).damage == damage
    moved = tmp_path / ("0" * 64) / path.parent.name / path.name
    moved.parent.mkdir(parents=True)
    moved.write_bytes(raw)
    assert inspect_page(moved).damage == "namespace"
    path.unlink()
    os.mkfifo(path)
    assert inspect_page(path).damage == "not_regular"
    with pytest.raises(BackendUnavailable):
        inspect_page(tmp_path / "nothing")


def test_purge_takes_namespaces_by_prefix_and_leaves_other_files(root: Path) -> None:
    other = FrameCodec(b"o" * 32, PAYLOAD_BYTES, tag=TagKind.NONE)
    store, second = open_file(root), open_file(root, other)
    store_chain(store, make_keys(3))
    store_chain(second, make_keys(4))
    foreign = [root / "notes.txt", root / NAMESPACE.hex() / "README", page_files(root)[0].parent / "x"]
    for path in foreign:
        path.write_text("mine")
    assert purge(root, namespace=NAMESPACE.hex()[:8], dry_run=True).pages == 3
    assert disk_usage(root)[0] == 7
    assert purge(root, namespace=NAMESPACE.hex()[:8]).pages == 3
    assert load(second, make_keys(4)) == [HIT] * 4
    assert purge(root).bytes == 4 * PAGE
    assert disk_usage(root) == (0, 0)
    assert all(path.read_text() == "mine" for path in foreign)
    check(store, root)


# Reading changes nothing

Snapshot = dict[str, tuple[int, ...]]


def snapshot(root: Path) -> Snapshot:
    """Return everything below `root` with inode, type, size, and times except for the access time."""
    found: Snapshot = {}
    for path in [root, *root.rglob("*")]:
        state = path.lstat()
        found[str(path)] = (state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return found


def make_damaged(root: Path) -> tuple[Subject, list[bytes]]:
    """Make a store of eight pages: too short, too long, empty, changed, a directory, a link; two are sound."""
    store = open_file(root)
    keys = make_keys(8)
    store_chain(store, keys)
    paths = [page_path(root, CODEC, key) for key in keys]
    raw = paths[0].read_bytes()
    paths[0].write_bytes(raw[:-1])
    paths[1].write_bytes(paths[1].read_bytes() + bytes(4096))
    paths[2].write_bytes(b"")
    store.write(keys[3], paths[3].read_bytes()[:1000] + b"\xff" + paths[3].read_bytes()[1001:])
    for path in paths[4:6]:
        path.unlink()
    paths[4].mkdir()
    paths[5].symlink_to(paths[6])
    return store, keys


DAMAGE = {"size": 2, "not_a_frame": 1, "tag": 1, "not_regular": 2}


@pytest.mark.parametrize("alive", [True, False])
def test_a_scrub_reports_damage_that_an_opening_may_remove_and_changes_nothing(root: Path, alive: bool) -> None:
    store, _ = make_damaged(root)
    if not alive:
        store.backend.close()
    before = snapshot(root)
    last = verify(root)
    assert (last.pages, last.pages_total, last.damaged, last.removed) == (8, 8, DAMAGE, 0)
    assert snapshot(root) == before
    store.backend.close()
    (root / "checked").unlink()
    open_file(root).backend.close()
    last = verify(root)
    assert (last.pages, last.damaged) == (3, {"tag": 1}), "the control: an opening that compares all files removes it"


@pytest.mark.parametrize("index", ["in use", "closed", "lost"])
def test_a_scrub_counts_removals_that_an_opening_would_make_too(root: Path, index: str) -> None:
    store, keys = make_damaged(root)
    if index != "in use":
        store.backend.close()
    for path in _files.index_files(root) if index == "lost" else ():
        path.unlink()
    last = verify(root, remove=True)
    assert (last.damaged, last.removed, disk_usage(root)[0]) == (DAMAGE, 6, 2)
    if index == "in use":
        assert load(store, keys) == [MISS] * 6 + [HIT] * 2
        check(store, root)
        store.backend.close()


def test_a_page_that_the_disk_cannot_read_is_reported_and_stays(root: Path) -> None:
    store = open_file(root)
    store_chain(store, make_keys(3))
    store.backend.close()

    def fault(name: str, number: int, args: tuple[object, ...]) -> None:
        if name == "preadv" and number == 3:
            raise OSError(errno.EIO, "broken")

    system = Faulty(fault)
    system.armed = False
    raw = StoredPages(FileInspection(None, file_options(root), system=system), "file")
    system.armed = True
    *_, last = verify_stored(raw, keys=NO_KEYS, remove=True)
    assert (last.pages, last.damaged, last.removed) == (3, {"unreadable": 1}, 0)
    raw.close()
    assert verify(root).damaged == {}


@pytest.mark.parametrize("age_s", [None, 0.0, 3600.0])
def test_a_dry_run_changes_nothing_and_predicts_the_purge(root: Path, age_s: float | None) -> None:
    store, keys = make_damaged(root)
    store.backend.close()
    for key in (keys[0], keys[3]):
        os.utime(page_path(root, CODEC, key), (1e9, 1e9))
    before = snapshot(root)
    said = purge(root, older_than_s=age_s, dry_run=True)
    assert snapshot(root) == before
    # One of the two old files has a matching row with its last use.
    assert said.pages == (1 if age_s else 8)
    assert purge(root, older_than_s=age_s) == said
    assert len(list(root.glob("*/*/*"))) == 8 - said.pages


def test_a_dry_run_knows_recency_from_an_index_that_is_in_use(root: Path) -> None:
    store = open_file(root)
    keys = make_keys(4)
    store_chain(store, keys)
    for key in keys:
        os.utime(page_path(root, CODEC, key), (1e9, 1e9))
    before = snapshot(root)
    assert purge(root, older_than_s=3600, dry_run=True).pages == 0
    assert snapshot(root) == before
    for path in _files.index_files(root):
        path.write_bytes(b"no index")
    assert purge(root, older_than_s=3600, dry_run=True).pages == 4


def test_reading_works_on_a_copy_that_was_never_opened(root: Path) -> None:
    make_damaged(root)[0].backend.close()
    for path in [*_files.index_files(root), root / "lock"]:
        path.unlink()
    (root / "tmp").rmdir()
    before = snapshot(root)
    last = verify(root)
    assert (last.pages, purge(root, dry_run=True).pages) == (8, 8)
    assert purge(root, older_than_s=3600, dry_run=True).pages == 0
    assert snapshot(root) == before


_ON_READ_ONLY = """
import sys
from pathlib import Path
from tests.backends._files import purge, verify
root = Path(sys.argv[1])
print(verify(root).pages, purge(root, dry_run=True).pages, purge(root, older_than_s=3600, dry_run=True).pages)
"""


def test_reading_works_on_a_read_only_mount(root: Path) -> None:
    make_damaged(root)[0].backend.close()
    mount = ["unshare", "--mount", "--map-root-user", "sh", "-c",
             'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99; shift; exec "$@"', "sh", str(root)]
    try:
        refused = subprocess.run([*mount, "touch", str(root / "x")], capture_output=True, check=False, timeout=300)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if refused.returncode == 99 or b"unshare" in refused.stderr:
        pytest.skip("may not mount anything here")
    assert b"Read-only file system" in refused.stderr
    command = [*mount, sys.executable, "-c", _ON_READ_ONLY, str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (result.stdout, result.stderr) == ("8 8 0\n", "")
