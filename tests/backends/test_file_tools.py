"""Inspect, scrub and purge: from the files alone, beside living engines, and nothing that is not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.backends.file.tools import inspect_page, purge_store, verify_store
from hicache.backends.testing import (
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    load,
    make_keys,
    store_chain,
)
from hicache.errors import BackendUnavailable, InvalidInput, NotOurs
from hicache.frame import HEADER_BYTES, FrameCodec, TagKind

from . import _files
from ._files import (
    CODEC,
    PAGE,
    check,
    disk_usage,
    open_file,
    page_files,
    page_path,
)  # fmt: skip


def test_inspect_reads_a_page_from_its_file_alone(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    keys = make_keys(2)
    store_chain(store, keys)
    report = inspect_page(page_path(root, CODEC, keys[1]))
    assert (report.damage, report.verified, report.tag_kind) == (None, True, "XXH3_128")
    assert (report.page_key, report.parent_key) == (keys[1].hex(), keys[0].hex())
    assert (report.namespace, report.payload_bytes) == (NAMESPACE.hex(), PAYLOAD_BYTES)
    store.backend.close()


def test_inspect_of_a_keyed_page_needs_the_key(tmp_path: Path) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_key=b"k" * 32)
    store = open_file(tmp_path / "s", codec)
    (key,) = make_keys(1)
    store_chain(store, [key])
    path = page_path(tmp_path / "s", codec, key)
    assert inspect_page(path).note == "unverifiable: MAC key needed"
    assert not inspect_page(path).verified
    assert inspect_page(path, mac_key=b"k" * 32).verified
    other = inspect_page(path, mac_key=b"x" * 32)
    assert (other.damage, other.verified, other.note) == (None, False, "unverifiable: sealed with another MAC key")
    store.backend.close()


def test_a_scrub_with_the_wrong_key_removes_nothing(tmp_path: Path) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_key=b"k" * 32)
    store = open_file(tmp_path / "s", codec)
    store_chain(store, make_keys(3))
    *_, last = verify_store(tmp_path / "s", mac_key=b"x" * 32, remove=True)
    assert (last.pages, last.unverifiable, last.removed, dict(last.damaged)) == (3, 3, 0, {})
    *_, last = verify_store(tmp_path / "s", mac_key=b"k" * 32)
    assert (last.pages, last.unverifiable) == (3, 0)
    store.backend.close()


def test_inspect_names_what_is_wrong(tmp_path: Path) -> None:
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
    ):  # fmt: skip
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
    store.backend.close()


def test_a_scrub_counts_by_reason_and_removes_when_told(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    keys = make_keys(8)
    store_chain(store, keys)
    raw = store.read(keys[0]) or b""
    store.write(keys[0], raw[:-1] + b"\x01")  # padding is not covered by the tag, and not part of the page
    store.write(keys[2], raw)
    store.write(keys[5], (store.read(keys[5]) or b"")[:300] + bytes(PAGE - 300))
    *_, last = verify_store(root)
    assert (last.pages, last.pages_total, last.bytes) == (8, 8, 8 * PAGE)
    assert (last.damaged, last.unverifiable, last.removed) == ({"page_key": 1, "tag": 1}, 0, 0)
    *_, last = verify_store(root, remove=True, rate_bytes_per_s=1e9)
    assert last.removed == 2
    *_, last = verify_store(root)
    assert (last.pages, last.damaged) == (6, {})
    check(store, root)
    store.backend.close()


def test_a_scrub_without_the_key_says_what_it_could_not_verify(tmp_path: Path) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_key=b"k" * 32)
    store = open_file(tmp_path / "s", codec)
    store_chain(store, make_keys(3))
    *_, last = verify_store(tmp_path / "s")
    assert (last.unverifiable, last.damaged) == (3, {})
    *_, last = verify_store(tmp_path / "s", mac_key=b"k" * 32)
    assert (last.unverifiable, last.damaged) == (0, {})
    store.backend.close()


def test_purge_takes_namespaces_by_prefix_and_leaves_other_files(tmp_path: Path) -> None:
    root = tmp_path / "s"
    other = FrameCodec(b"o" * 32, PAYLOAD_BYTES, tag=TagKind.NONE)
    store, second = open_file(root), open_file(root, other)
    store_chain(store, make_keys(3))
    store_chain(second, make_keys(4))
    foreign = [root / "notes.txt", root / NAMESPACE.hex() / "README", page_files(root)[0].parent / "x"]
    for path in foreign:
        path.write_text("mine")
    assert purge_store(root, namespace=NAMESPACE.hex()[:8], dry_run=True).pages == 3
    assert disk_usage(root)[0] == 7
    assert purge_store(root, namespace=NAMESPACE.hex()[:8]).pages == 3
    assert load(second, make_keys(4)) == [HIT] * 4
    assert purge_store(root).bytes == 4 * PAGE
    assert disk_usage(root) == (0, 0)
    assert all(path.read_text() == "mine" for path in foreign)
    check(store, root)
    store.backend.close()
    second.backend.close()


def test_purge_by_age_leaves_what_was_used_lately(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = open_file(root)
    keys = make_keys(4)
    store_chain(store, keys)
    store.backend.close()
    for path in _files.index_files(root):
        path.unlink()
    for key in keys[2:]:
        os.utime(page_path(root, CODEC, key), (1e9, 1e9))
    assert purge_store(root, older_than_s=3600).pages == 2
    store = open_file(root)
    assert load(store, keys) == [HIT, HIT, MISS, MISS]
    store.backend.close()


def test_tools_refuse_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotOurs):
        purge_store(tmp_path)
    with pytest.raises(BackendUnavailable):
        purge_store(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    with pytest.raises(InvalidInput):
        purge_store(tmp_path, namespace="../..")
    with pytest.raises(InvalidInput):
        list(verify_store(tmp_path, rate_bytes_per_s=0))
