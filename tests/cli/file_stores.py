"""File stores with pages, for tests of commands."""

from __future__ import annotations

from pathlib import Path

from hicache.backends.file import FileDriver
from hicache.backends.storage import Storage
from hicache.config import FileStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import STORED, Subject, store_chain, store_of


def subject_of(storage: Storage) -> Subject:
    """Return storage for the helpers of the contract, without access to its stored bytes."""
    return Subject(storage, lambda key: None, lambda key, data: None)


def opened(root: Path, codec: FrameCodec) -> Subject:
    """Open the file store in a directory."""
    return subject_of(store_of(FileDriver, codec, FileStorageOptions(path=root, free_space_floor=0)))


def fill(root: Path, codec: FrameCodec, keys: list[bytes]) -> None:
    """Store a chain of pages."""
    store = opened(root, codec)
    assert store_chain(store, keys) == [STORED] * len(keys)
    store.backend.close()
