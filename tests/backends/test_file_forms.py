"""Pages of several lengths in one file store: their room, their index, their tools and their direct I/O."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.tools.verify import PageKeys, encoding_name, inspect_page, tag_name
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    Subject,
    load,
    make_keys,
    store_chain,
)

from . import _files
from ._files import (
    CIPHER_KEY,
    CODEC,
    FORMS,
    PAGE,
    check,
    disk_usage,
    open_file,
    page_path,
    purge,
    reserved_bytes,
    verify,
)

REJECTED = SetOutcome.REJECTED
# A compressed page of the tests takes one block, its frame two.
SHORT = 4096


def evicted(store: Subject) -> int:
    return store.backend.statistics().evicted_pages


def test_room_reserved_beyond_a_pages_length_is_released(root: Path) -> None:
    store = open_file(root, FORMS["zstd"], capacity=6 * PAGE)
    for number in range(3):
        assert store_chain(store, make_keys(3, f"chain {number}")) == [STORED] * 3
        assert reserved_bytes(root) == 0
    assert store.backend.usage().bytes == 9 * SHORT
    assert evicted(store) == 0
    check(store, root)


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_of_all_encodings_is_unchanged_after_reopening(root: Path, lost: bool) -> None:
    for form, codec in FORMS.items():
        store = open_file(root, codec)
        store_chain(store, make_keys(3, form))
        store.backend.close()
    if lost:
        for path in _files.index_files(root):
            path.unlink()
    before = disk_usage(root)
    store = open_file(root)
    check(store, root)
    assert disk_usage(root) == before == (12, 6 * PAGE + 6 * SHORT)
    assert load(store, make_keys(3, "zstd")) == [HIT] * 3
    assert load(store, make_keys(3, "gcm")) == [CORRUPT] * 3


@pytest.mark.parametrize("form", ["zstd", "zstd+gcm"])
def test_a_page_truncated_or_extended_by_a_block_is_dropped_at_opening(
    tmp_path: Path, form: str
) -> None:
    root, codec = tmp_path / "s", FORMS[form]
    store = open_file(root, codec)
    keys = make_keys(3)
    store_chain(store, keys)
    store.backend.close()
    page_path(root, codec, keys[0]).write_bytes(bytes(SHORT))
    path = page_path(root, codec, keys[1])
    path.write_bytes(path.read_bytes() + bytes(SHORT))
    for index in _files.index_files(root):
        index.unlink()
    open_file(root, codec).backend.close()
    assert disk_usage(root) == (1, SHORT)


def test_pages_of_an_older_version_stay_until_their_room_is_needed(root: Path) -> None:
    older = FrameCodec(b"o" * 32, PAYLOAD_BYTES)
    store = open_file(root, older)
    (key,) = make_keys(1)
    store_chain(store, [key])
    path = page_path(root, older, key)
    raw = bytearray(path.read_bytes())
    raw[36] = 1
    raw[152:200] = bytes(48)
    path.write_bytes(raw)
    store.backend.close()
    for index in _files.index_files(root):
        index.unlink()
    store = open_file(root, capacity=2 * PAGE)
    assert store.backend.usage().pages == 1
    assert store_chain(store, make_keys(2, "new")) == [STORED] * 2
    assert not path.exists()


def test_a_page_that_cannot_be_expanded_here_is_a_miss_and_stays(root: Path) -> None:
    """An engine without the extra `compression` must not remove compressed pages of other engines."""
    store = open_file(root, FORMS["zstd"])
    store_chain(store, make_keys(2))
    store.backend.close()
    script = """
import sys
sys.modules["zstandard"] = None
from hicache.backends.file import FileDriver
from hicache.backends.memory import MemoryDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.config import FileStorageOptions
from hicache.frame import FrameCodec
codec = FrameCodec(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
key = bytes.fromhex(sys.argv[4])
file = FileDriver(codec, FileStorageOptions(path=sys.argv[1]))
memory = MemoryDriver()
memory.poke(codec.namespace, key, open(sys.argv[5], "rb").read())
for driver in (file, memory):
    backend = Store(driver, codec, UNGUARDED)
    frame = memoryview(bytearray(codec.frame_bytes))
    print(*backend.batch_get([key], [frame], deadline=float("inf")), dict(backend.statistics().errors))
    print(dict(backend.statistics().corrupt), backend.usage().pages)
    backend.close()
"""
    (key, _) = make_keys(2)
    arguments = [str(root), NAMESPACE.hex(), str(PAYLOAD_BYTES), key.hex(), str(page_path(root, CODEC, key))]
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.stderr == ""
    assert ended.stdout == "miss {'no_zstd': 1}\n{} 2\nmiss {'no_zstd': 1}\n{} 1\n"


# Tools


def test_inspect_shows_the_encoding_and_the_metadata_of_a_page(root: Path) -> None:
    codec = FrameCodec(
        NAMESPACE, PAYLOAD_BYTES, encryption_keys=[CIPHER_KEY], compression=FORMS["zstd"]._compression,
        weights_epoch=7, label="llama",
    )
    store = open_file(root, codec)
    (key,) = make_keys(1)
    store_chain(store, [key])
    path = page_path(root, codec, key)
    report = inspect_page(path)
    header = report.header
    assert header is not None
    assert (tag_name(header), encoding_name(header), header.label, header.weights_epoch) == (
        "AES_256_GCM", "zstd+byte_planes", "llama", 7,
    )
    assert (report.is_proved, report.damage, report.note) == (False, None, "unverifiable: encryption key needed")
    assert inspect_page(path, keys=PageKeys(encryption=(CIPHER_KEY,))).is_proved
    assert inspect_page(path, keys=PageKeys(encryption=(b"x" * 32, CIPHER_KEY))).is_proved
    assert inspect_page(path, keys=PageKeys(encryption=(b"x" * 32,))).unsupported == "encryption_key"
    assert inspect_page(path, keys=PageKeys(mac=(CIPHER_KEY,))).unsupported == "tag_kind"
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)
    assert inspect_page(path).damage is None, "damage was reported without the key"
    assert inspect_page(path, keys=PageKeys(encryption=(CIPHER_KEY,))).damage == "tag"
    path.write_bytes(raw + bytes(4096))
    assert inspect_page(path).damage == "size"


def test_a_scrub_proves_all_encodings_and_removes_only_damaged_pages(root: Path) -> None:
    for form, codec in FORMS.items():
        store = open_file(root, codec)
        store_chain(store, make_keys(3, form))
        store.backend.close()
    path = page_path(root, CODEC, make_keys(3, "zstd")[1])
    path.write_bytes(path.read_bytes()[:600].ljust(SHORT, b"\0"))
    last = verify(root)
    assert (last.pages, last.damaged, last.unverifiable) == (12, {"tag": 1}, 6)
    last = verify(root, keys=PageKeys(encryption=(CIPHER_KEY,)), remove=True)
    assert (last.damaged, last.unsupported, last.unverifiable, last.removed) == ({"tag": 1}, {"tag_kind": 5}, 0, 1)
    assert disk_usage(root)[0] == 11
    assert purge(root).bytes == 6 * PAGE + 5 * SHORT
