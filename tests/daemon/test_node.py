"""A node releases everything if a namespace cannot be opened."""

from __future__ import annotations

import contextlib
import time

import pytest

from hicache.backends.base import StorageBackend
from hicache.config import HiCacheConfig
from hicache.daemon.node import NamespaceRequest, Node
from hicache.daemon.refusal import Refused
from hicache.errors import BackendError
from hicache.frame import FrameCodec
from tests.waiting import WAIT_S

DIGEST = b"n" * 32


def test_a_namespace_that_cannot_be_opened_leaves_no_store_and_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(HiCacheConfig.model_validate({"daemon": {"pool": "1MiB"}, "storage": {"type": "memory"}}), {})
    opened: list[StorageBackend | None] = []
    opening = node.storage.open

    def count(codec: FrameCodec) -> StorageBackend | None:
        opened.append(opening(codec))
        return opened[-1]

    def fail(codec: FrameCodec) -> StorageBackend | None:
        raise BackendError("no such server")

    request, deadline = NamespaceRequest(9000, 0, ""), time.monotonic() + WAIT_S
    with contextlib.closing(contextlib.ExitStack()) as undo:
        undo.callback(node.close, deadline)
        closing = node.pool.open(DIGEST, 5000)  # as if the same namespace were being closed
        monkeypatch.setattr(node.storage, "open", count)
        with pytest.raises(Refused, match="is being closed"):
            node.open(DIGEST.hex(), request, deadline)
        assert opened == []
        node.pool.close(closing)
        monkeypatch.setattr(node.storage, "open", fail)
        with pytest.raises(Refused, match="cannot be opened"):
            node.open(DIGEST.hex(), request, deadline)
        monkeypatch.setattr(node.storage, "open", count)
        assert node.open(DIGEST.hex(), NamespaceRequest(5000, 0, ""), deadline).wire.payload_bytes == 5000
        assert len(opened) == 1, "the control: the space of the other size is gone, so the store is opened"
