"""Batches of page files by the native helper, and pages in a store's room, whose rows are written later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file.index import Index
from hicache.backends.file.pages import PageFiles
from hicache.backends.file.system import System
from hicache.frame import FrameCodec, PageBuffer, TagKind, header_of, unseal
from hicache.frame.header import STORED_TIME, TAG
from hicache.lazy import native
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    STORED,
    Subject,
    delete,
    empty_frames,
    empty_views,
    exists,
    full_frames,
    full_views,
    holds,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds

from ._files import (
    CODEC,
    FORMS,
    PAGE,
    SYSTEM_CALLS,
    Faulty,
    check,
    disk_usage,
    file_driver,
    index_files,
    obstruct,
    open_file,
    page_path,
    reserved_bytes,
)
from .test_file_crash import Killing, killing  # noqa: F401 - a fixture

FEW_BYTES = FrameCodec(NAMESPACE, 60)
CODECS = {**FORMS, "no tag": FrameCodec(NAMESPACE, 5000, tag=TagKind.NONE), "few bytes": FEW_BYTES,
          "large": FrameCodec(NAMESPACE, (3 << 20) + 77)}
KEYS = make_keys(6)


class ByPage(System):
    """The system as it is, but without the native helper."""


@pytest.fixture(autouse=True)
def _has_helper() -> None:
    if native("read_page_files") is None:
        pytest.skip("no native helper")


def is_pending(store: Subject) -> bool:
    return file_driver(store)._store.room.is_pending


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize("writes_natively", [True, False])
def test_the_helper_and_the_python_path_write_and_read_the_same_files(
    tmp_path: Path, form: str, writes_natively: bool
) -> None:
    codec = CODECS[form]
    ours = open_file(tmp_path / "s", codec, system=None if writes_natively else ByPage())
    other = open_file(tmp_path / "s", codec, system=ByPage() if writes_natively else None)
    assert [file_driver(store)._files.batches for store in (ours, other)] == [writes_natively, not writes_natively]
    pages: list[PageBuffer] = [*full_frames(codec, KEYS[:3]), *full_views(codec, KEYS[3:])]
    assert ours.backend.batch_set(KEYS, pages, parent=None, deadline=soon()) == [STORED] * 6
    for store in (ours, other):
        assert exists(store, [*KEYS, make_keys(1, "missing")[0]]) == 6
        both: tuple[Sequence[PageBuffer], ...] = empty_frames(codec, 6), empty_views(codec, 6)
        for buffers in both:
            assert store.backend.batch_get(KEYS, buffers, deadline=soon()) == [HIT] * 6
            assert all(holds(codec, key, page) for key, page in zip(KEYS, buffers, strict=True))
    check(ours, tmp_path / "s")


@pytest.mark.parametrize("payload_bytes", [60, 1000, 4096, 8192 - 256, 100_000, 1 << 20])
def test_the_helper_seals_as_the_codec_does(payload_bytes: int) -> None:
    codec = FrameCodec(NAMESPACE, payload_bytes, weights_epoch=7, label="model")
    seal_pages = native("seal_pages")
    fields = codec.fields()
    if fields is None:
        assert payload_bytes == 60
        return
    both: list[tuple[Sequence[PageBuffer], Sequence[PageBuffer]]] = [
        (full_frames(codec, KEYS), full_frames(codec, KEYS)), (full_views(codec, KEYS), full_views(codec, KEYS))
    ]
    for pages, same in both:
        parents = [None, *KEYS[:-1]]
        seal_pages([codec.unsealed_buffers(page) for page in pages], KEYS, parents, fields)
        for key, parent, ours, theirs in zip(KEYS, parents, pages, same, strict=True):
            unseal(header_of(theirs))
            codec.seal_buffers(key, theirs, parent=parent)
            header_of(theirs)[STORED_TIME] = header_of(ours)[STORED_TIME]
            assert codec.is_sealed(key, ours)
            unseal(header_of(theirs))  # with the same time it has the same tag
            header_of(theirs)[:8] = bytes(8)
            again = [codec.unsealed_buffers(theirs)]
            seal_pages(again, [key], [parent], (*fields[:4], int.from_bytes(header_of(ours)[STORED_TIME], "little")))
            assert bytes(header_of(ours)) == bytes(header_of(theirs))
        # A page that is sealed keeps tag and time; one with another parent only its time.
        before = bytes(header_of(pages[1]))
        later = (*fields[:4], fields[4] + 100)
        seal_pages([codec.unsealed_buffers(pages[1])], KEYS[1:2], [KEYS[0]], later)
        assert bytes(header_of(pages[1])) == before
        seal_pages([codec.unsealed_buffers(pages[1])], KEYS[1:2], [KEYS[3]], later)
        after = bytes(header_of(pages[1]))
        assert after[STORED_TIME] == before[STORED_TIME] and after[TAG] != before[TAG]


def _damage(path: Path, kind: str, tmp_path: Path) -> None:
    data = path.read_bytes()
    if kind == "payload":
        path.write_bytes(data[:3000] + bytes([data[3000] ^ 1]) + data[3001:])
    elif kind == "header":
        path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    elif kind == "short":
        path.write_bytes(data[:4096])
    elif kind == "odd":
        path.write_bytes(data[:-1])
    elif kind == "long":
        path.write_bytes(data + bytes(4096))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder link":
        path.parent.rename(tmp_path / "away")
        path.parent.symlink_to(tmp_path / "away")
    else:
        outside = tmp_path / "outside"
        outside.write_bytes(data)
        obstruct(path, kind, outside)


@pytest.mark.parametrize(
    "kind",
    ["payload", "header", "short", "odd", "long", "empty", "fifo", "link", "socket", "directory", "full directory",
     "folder link"],
)
def test_the_helper_and_the_python_path_agree_about_strange_files(tmp_path: Path, kind: str) -> None:
    outcomes = []
    for number, system in enumerate((None, ByPage())):
        folder = tmp_path / str(number)
        folder.mkdir()
        store = open_file(folder / "s", system=system)
        store_chain(store, KEYS)
        _damage(page_path(folder / "s", CODEC, KEYS[2]), kind, folder)
        found = exists(store, KEYS), load(store, KEYS), load(store, KEYS), exists(store, KEYS)
        outcomes.append((found, store.backend.statistics().corrupt, store.backend.statistics().errors))
        if (folder / "outside").exists():
            assert (folder / "outside").read_bytes()
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][1][2] in (MISS, CORRUPT)


def test_the_helper_rejects_arguments_that_do_not_fit(tmp_path: Path) -> None:
    read, write = native("read_page_files"), native("write_page_files")
    (frame,) = full_frames(CODEC, KEYS[:1])
    fields = CODEC.fields()
    for keys, pages, error in (
        ([b"short"], [frame], ValueError), ([], [frame], ValueError), (KEYS[:1], [frame[:100]], ValueError),
        (KEYS[:1], [frame[:1000]], ValueError), (KEYS[:1], (frame,), TypeError),
        (KEYS[:1], [bytes(frame)], BufferError),
    ):
        with pytest.raises(error):
            read(0, "x", keys, pages, fields, 1.0)
    with pytest.raises(ValueError, match="writable"):
        write(0, "x", ["a"], [bytes(frame)], KEYS[:1], [None], fields, False, 0, 1.0)


def test_pages_are_not_started_after_the_deadline(tmp_path: Path) -> None:
    store = open_file(tmp_path / "s")
    store_chain(store, KEYS)
    files = file_driver(store)._files
    assert isinstance(files, PageFiles)
    frames = [[frame] for frame in empty_frames(CODEC, 6)]
    read = native("read_page_files")
    root_fd = file_driver(store)._store.root_fd
    assert read(root_fd, NAMESPACE.hex(), KEYS, frames, CODEC.fields(), 0.0) == [-1] * 6
    assert read(root_fd, NAMESPACE.hex(), KEYS, frames, CODEC.fields(), 9.0) == [0] * 6


# The room


def singles(store: Subject, keys: list[bytes]) -> list[object]:
    """Store a chain, one page per call."""
    frames = full_frames(store.backend.codec, keys)
    return [
        store.backend.batch_set([key], [frame], parent=keys[at - 1] if at else None, deadline=soon())[0]
        for at, (key, frame) in enumerate(zip(keys, frames, strict=True))
    ]


def test_single_pages_are_hits_at_once_and_their_rows_follow(tmp_path: Path) -> None:
    root, keys = tmp_path / "s", make_keys(30)
    store, other = open_file(root), open_file(root)
    assert singles(store, keys) == [STORED] * 30
    assert is_pending(store), "no page was stored in the room"
    assert load(other, keys) == [HIT] * 30 and exists(other, keys) == 30
    assert other.backend.usage().pages < 30
    assert store.backend.usage().pages == 30 and not is_pending(store)
    assert other.backend.usage().pages == 30
    check(store, root)
    store.backend.close()
    other.backend.close()
    assert reserved_bytes(root) == 0
    again = open_file(root)
    assert load(again, keys) == [HIT] * 30
    check(again, root)


def test_a_room_counts_as_reserved_until_its_opening_ends(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    singles(store, KEYS)
    with file_driver(store)._store.transaction(soon()) as index:
        held = index.totals().reserved
    assert held > 0
    store.backend.close()
    with file_driver(open_file(root))._store.transaction(soon()) as index:
        assert index.totals().reserved == 0
        index.check()


def test_pages_that_another_process_removes_before_their_rows_are_written_get_none(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store, other = open_file(root), open_file(root)
    singles(store, KEYS)
    assert is_pending(store)
    assert delete(other, KEYS[3:]) == 3
    check(store, root)
    assert disk_usage(root)[0] == 3


def test_a_failure_in_the_room_leads_to_a_transaction(tmp_path: Path) -> None:
    root, fails = tmp_path / "s", [False]

    def before(name: str, number: int, args: tuple[object, ...]) -> object:
        if fails[0] and name == "pwritev":
            fails[0] = False
            raise OSError(5, "once")
        return None

    assert "pwritev" in SYSTEM_CALLS
    store = open_file(root, system=Faulty(before))
    singles(store, KEYS[:2])
    fails[0] = True
    assert store_chain(store, KEYS[2:]) == [STORED] * 4
    assert not fails[0]
    check(store, root)


def test_an_index_that_is_lost_gets_the_pages_of_the_room(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    singles(store, KEYS)
    assert is_pending(store)
    for path in index_files(root):
        path.unlink()
    check(store, root)
    singles(store, make_keys(4, "more"))
    check(store, root)
    assert disk_usage(root)[0] == 10


def test_a_full_store_makes_way_for_a_room(tmp_path: Path) -> None:
    root, capacity = tmp_path / "s", 1280 * PAGE
    store = open_file(root, capacity=capacity)
    keys = make_keys(1280)
    assert store_chain(store, keys) == [STORED] * 1280
    for number in range(40):
        assert singles(store, make_keys(2, f"more {number}")) == [STORED] * 2
        assert disk_usage(root)[1] <= capacity
    check(store, root)
    assert disk_usage(root)[0] >= 1240


@pytest.mark.parametrize("seed", seeds(2))
def test_kills_amid_single_pages_leave_a_sound_store(
    killing: Killing, tmp_path: Path, seed: int  # noqa: F811 - the fixture
) -> None:
    root, dice = tmp_path / "s", rng(seed)
    survivor = open_file(root)
    for _ in range(12):
        ended = killing.run("singles", root, kill_after_s=dice.uniform(0.002, 0.08))
        told = ended["told"].get("single", 0)
        with file_driver(survivor)._store.transaction(soon()) as index:
            totals = index.totals()
            assert totals.bytes + totals.reserved >= disk_usage(root)[1], "the index counts too few bytes"
        opened = open_file(root)
        check(opened, root)
        assert load(opened, make_keys(told, "single")) == [HIT] * told
        opened.backend.close()
        assert delete(survivor, make_keys(4000, "single")) >= told
    survivor.backend.close()


# Rows of a batch


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    path = tmp_path / "index"
    path.touch()
    index = Index(str(path), create=True)
    yield index
    index.close()


@pytest.mark.parametrize("seed", seeds(4))
def test_rows_of_a_batch_are_those_of_single_pages(index: Index, tmp_path: Path, seed: int) -> None:
    dice, keys = rng(seed), make_keys(12)
    (tmp_path / "other").touch()
    other = Index(str(tmp_path / "other"), create=True)
    for number in range(40):
        chain = dice.sample(keys, dice.randrange(1, 6))
        first = dice.choice([None, *keys])
        first = None if first in chain else first
        parents = [first, *chain[:-1]]
        writer = dice.choice(["", f"{'0' * 16}.{number + 1}"])
        for one, size in ((index, len(chain)), (other, 1)):
            one.begin()
            for at in range(0, len(chain), size):
                one.reserve(NAMESPACE, chain[at : at + size], parents[at : at + size], writer, 4096, number)
            one.commit()
        gone = dice.choice(keys)
        for one in (index, other):
            one.begin()
            one.drop(NAMESPACE, gone)
            one.check()
            rows = "SELECT key, parent, writer, size, children, last_use FROM pages ORDER BY key, writer"
            one.commit()
        assert index._run(rows) == other._run(rows)
    other.close()


def test_errors_of_a_missing_store_are_not_raised(tmp_path: Path) -> None:
    store = open_file(tmp_path / "s")
    singles(store, KEYS)
    (tmp_path / "s").rename(tmp_path / "moved")
    outcomes = singles(store, make_keys(40, "lost"))
    assert set(outcomes) <= {STORED, SetOutcome.ERROR}
    (tmp_path / "moved").rename(tmp_path / "s")
    check(store, tmp_path / "s")
