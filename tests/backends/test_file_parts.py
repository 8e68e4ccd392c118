"""Pages in parts in a file store: moved without a copy through the page cache, through an aligned frame with direct
I/O, and whole or not at all if a transfer fails in the middle of a list. And pages that are read in pieces, which are
checked as a whole."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.frame import HEADER_BYTES, Compression, FrameCodec, FrameHeader, PageView, first_bytes, frame_bytes
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    empty_frames,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache_lab.conformance.pages import holds, in_parts
from tests.seeds import seeds

from ._files import CIPHER_KEY, FORMS, MAC_KEY, Faulty, check, open_file, temporary_files

MIB = 1 << 20
# Longer than a piece that is hashed while warm, and not a round number.
CODEC = FrameCodec(NAMESPACE, 2 * MIB + 12_345)
CODECS = {
    "plain": CODEC,
    "gmac": FrameCodec(NAMESPACE, CODEC.payload_bytes, mac_keys=[MAC_KEY]),
    "zstd+gcm": FrameCodec(
        NAMESPACE, CODEC.payload_bytes, encryption_keys=[CIPHER_KEY], compression=Compression()
    ),
}
IOV_MAX = 1024


def views(keys: list[bytes], parts: int, *, full: bool = True) -> list[PageView]:
    found = [in_parts(CODEC, frame, parts) for frame in full_frames(CODEC, keys)]
    for view in found if not full else ():
        for part in view.parts:
            part[:] = bytes(part.nbytes)
    return found


def store_views(store: Subject, keys: list[bytes], parts: int = 70) -> list[Any]:
    return store.backend.batch_set(keys, views(keys, parts), parent=None, deadline=soon())


def load_views(store: Subject, keys: list[bytes], parts: int = 70) -> list[Any]:
    """Read pages into parts and assert that each hit is the right page."""
    pages = views(keys, parts, full=False)
    outcomes = store.backend.batch_get(keys, pages, deadline=soon())
    for key, page, outcome in zip(keys, pages, outcomes, strict=True):
        assert outcome is not HIT or holds(CODEC, key, page), "a wrong page was served"
    return outcomes


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


class Noted:
    """A system that records the buffers of reads and writes; moves at most `step` bytes per call, None for all."""

    def __init__(self, step: int | None = None) -> None:
        self.lists: dict[str, list[list[memoryview]]] = {"preadv": [], "pwritev": []}
        self.step = step

    def __call__(self, name: str, number: int, args: tuple[Any, ...]) -> int | None:
        if name not in self.lists:
            return None
        fd, buffers, offset = args
        self.lists[name].append(list(buffers))
        if self.step is None:
            return None
        call = os.preadv if name == "preadv" else os.pwritev
        return call(fd, first_bytes(buffers, self.step), offset)


def open_noted(root: Path, step: int | None = None, codec: FrameCodec = CODEC, **options: Any) -> tuple[Subject, Noted]:
    noted = Noted(step)
    system = Faulty(noted)
    system.armed = False
    store = open_file(root, codec, system=system, io_threads=1, **options)
    system.armed = True
    return store, noted


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize("parts", [2, 64, 3000])
def test_pages_of_any_number_of_parts_are_stored_and_read(tmp_path: Path, form: str, parts: int) -> None:
    store = open_file(tmp_path / "s", CODECS[form])
    keys = make_keys(3)
    assert store_views(store, keys, parts) == [STORED] * 3
    assert load_views(store, keys, parts) == [HIT] * 3
    assert load(store, keys) == [HIT] * 3
    assert store_views(store, keys, parts) == [PRESENT] * 3
    assert store.backend.statistics().errors == {}
    check(store, tmp_path / "s")


def test_parts_are_moved_in_place_and_lists_fit_one_call(tmp_path: Path) -> None:
    store, noted = open_noted(tmp_path / "s")
    (key,) = make_keys(1)
    for verb, name in (("batch_set", "pwritev"), ("batch_get", "preadv")):
        (page,) = views([key], 3000, full=verb == "batch_set")
        first, last = address(page.parts[0]), address(page.parts[-1]) + page.parts[-1].nbytes
        if verb == "batch_set":
            assert store.backend.batch_set([key], [page], parent=None, deadline=soon()) == [STORED]
        else:
            assert store.backend.batch_get([key], [page], deadline=soon()) == [HIT]
        lists = noted.lists[name]
        assert len(lists) >= 3 and max(map(len, lists)) <= IOV_MAX
        moved = [buffer for buffers in lists for buffer in buffers]
        assert sum(buffer.nbytes for buffer in moved) == CODEC.frame_bytes
        foreign = [
            buffer for buffer in moved
            if address(buffer) != address(page.header) and not first <= address(buffer) < last
        ]
        assert sum(buffer.nbytes for buffer in foreign) < 4096, "more than the padding is not the caller's memory"


@pytest.mark.parametrize("step", [99_991, 255, MIB - 1])
def test_short_transfers_of_lists_are_continued(tmp_path: Path, step: int) -> None:
    store, noted = open_noted(tmp_path / "s", step)
    keys = make_keys(1 if step < 1000 else 2)
    assert store_views(store, keys) == [STORED] * len(keys)
    assert load_views(store, keys) == [HIT] * len(keys)
    assert min(map(len, noted.lists.values())) >= len(keys) * (CODEC.frame_bytes // step)
    assert store.backend.statistics().errors == {}


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_in_the_middle_of_a_list_costs_one_page(tmp_path: Path, call: str) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> int | None:
        if name != call:
            return None
        if number == 6:  # of the second page, after its first bytes were moved
            raise OSError(errno.EIO, "broken")
        return (os.preadv if call == "preadv" else os.pwritev)(args[0], first_bytes(args[1], MIB), args[2])

    system = Faulty(fault)
    system.armed = False
    store = open_file(tmp_path / "s", system=system, codec=CODEC, io_threads=1)
    keys = make_keys(3)
    if call == "preadv":
        store_views(store, keys)
    system.armed = True
    if call == "pwritev":
        assert store_views(store, keys) == [STORED, SET_ERROR, STORED]
    else:
        assert load_views(store, keys) == [HIT, GET_ERROR, HIT]
    system.armed = False
    assert store.backend.statistics().errors == {"EIO": 1}
    assert load_views(store, keys) == [HIT, MISS if call == "pwritev" else HIT, HIT]
    check(store, tmp_path / "s")
    assert len(temporary_files(tmp_path / "s")) == 1


def test_a_read_that_ends_before_the_file_does_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    system = Faulty(lambda name, number, args: 0 if name == "preadv" and number == 2 else None)
    system.armed = False
    store = open_file(tmp_path / "s", system=system, codec=CODEC)
    (key,) = make_keys(1)
    store_views(store, [key])
    system.armed = True
    load_views(store, [key])
    found = store.backend.statistics()
    assert (found.corrupt, found.errors) == ({}, {"EIO": 1})
    assert load_views(store, [key]) == [HIT]


@pytest.mark.parametrize("form", CODECS)
def test_direct_io_moves_unaligned_parts_through_aligned_frames(disk_path: Path, form: str) -> None:
    store, noted = open_noted(disk_path / "s", codec=CODECS[form], direct_io=True)
    keys = make_keys(3)
    assert store_views(store, keys) == [STORED] * 3
    assert load_views(store, keys) == [HIT] * 3
    moved = [buffers for lists in noted.lists.values() for buffers in lists]
    assert len(moved) == 6, "a page took more than one transfer"
    assert all(address(buffer) % 4096 == 0 == buffer.nbytes % 4096 for buffers in moved for buffer in buffers)
    assert "EINVAL" not in store.backend.statistics().errors
    check(store, disk_path / "s")


def test_direct_io_holds_one_frame_per_thread_and_not_one_per_page(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = FrameCodec(NAMESPACE, CODEC.payload_bytes)
    lent: list[weakref.ref[memoryview]] = []
    alive: list[int] = []
    take = codec.scratch_frame

    def note() -> memoryview:
        alive.append(sum(view() is not None for view in lent))
        frame = take()
        lent.append(weakref.ref(frame))
        return frame

    monkeypatch.setattr(codec, "scratch_frame", note)
    store = open_file(disk_path / "s", codec, direct_io=True, io_threads=1)
    keys = make_keys(8)
    assert store_views(store, keys) == [STORED] * 8
    assert load_views(store, keys) == [HIT] * 8
    assert len(alive) == 16 and max(alive) <= 1


SMALL_CODECS = {**FORMS, "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[MAC_KEY])}
# For each encoding.
CLEAN_READS = 20_000
PAYLOAD_FLIPS = 400
# The tag covers every byte from its nonce to the end of the payload, and is compared itself.
HEADER_BITS = HEADER_BYTES * 8


@pytest.mark.parametrize("name", SMALL_CODECS)
def test_a_page_read_in_pieces_is_checked_as_a_whole(tmp_path: Path, name: str) -> None:
    """Large pages are hashed piece by piece while they are read; a flip on either side of an edge is detected."""
    mib = 1 << 20
    codec = large_codec(name, 3 * mib + 76)
    store = open_file(tmp_path / "s", codec)
    (key,) = make_keys(1)
    store_chain(store, [key])
    good = store.read(key) or b""
    assert load(store, [key]) == [HIT]
    header = FrameHeader.parse(good)
    assert header is not None and len(good) == frame_bytes(header.stored_bytes)
    end = HEADER_BYTES + header.stored_bytes
    edges = (mib, mib + 4096, 2 * mib, 2 * mib + 8192, 3 * mib)  # the longest page is read in three equal pieces
    for place in (23, 24, *(edge + side for edge in edges for side in (-1, 0) if edge < end), end - 1):
        raw = bytearray(good)
        raw[place] ^= 0x40
        store.write(key, bytes(raw))
        assert load(store, [key]) == [CORRUPT], f"byte {place}"
    store.write(key, good)
    assert load(store, [key]) == [HIT]


def test_a_large_page_is_read_in_equal_pieces(tmp_path: Path) -> None:
    """A header must not cost an extra call if the payload is a multiple of the piece size."""
    lengths: list[int] = []
    system = Faulty(lambda name, _, args: lengths.append(sum(map(len, args[1]))) if name == "preadv" else None)
    store = open_file(tmp_path / "s", large_codec("gmac", 2 << 20), system=system)
    plain = open_file(tmp_path / "plain", FrameCodec(NAMESPACE, 2 << 20), system=system)
    for where in (store, plain):
        store_chain(where, keys := make_keys(1))
        lengths.clear()
        assert load(where, keys) == [HIT]
        assert lengths == ([(2 << 20) + 4096] if where is store else [(1 << 20) + 4096, 1 << 20])


def large_codec(name: str, payload_bytes: int) -> FrameCodec:
    """Return the codec of SMALL_CODECS for another payload length."""
    compression = Compression() if "zstd" in name else None
    if "gcm" in name:
        return FrameCodec(NAMESPACE, payload_bytes, encryption_keys=[MAC_KEY], compression=compression)
    return FrameCodec(
        NAMESPACE, payload_bytes, mac_keys=[MAC_KEY] if name == "gmac" else [], compression=compression
    )


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", SMALL_CODECS)
def test_many_clean_reads_raise_no_alarm(tmp_path: Path, name: str, seed: int) -> None:
    codec = large_codec(name, 1000 if "zstd" not in name else 5000)
    store = open_file(tmp_path / "s", codec)
    keys = make_keys(500, f"seed {seed}")
    assert store_chain(store, keys) == [STORED] * 500
    frames = empty_frames(codec, 500)
    for _ in range(CLEAN_READS // 500):
        assert set(store.backend.batch_get(keys, frames, deadline=soon())) == {HIT}
    found = store.backend.statistics()
    assert (found.gets[HIT], dict(found.corrupt), dict(found.errors)) == (CLEAN_READS, {}, {})
