"""The backend `remote` against the contract: a real daemon, with shared frames and with page bodies."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import pytest

from hicache.backends.remote import RemoteDriver
from hicache.backends.testing import (
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    DriverContract,
    OpenStore,
    Subject,
    load,
    make_keys,
    sealed,
    soon,
    store_chain,
    store_of,
)
from hicache.backends.testing.bounds import MANY_PAGES
from hicache.errors import ConfigError
from hicache.frame import Compression, FrameCodec, TagKind
from tests.backends.remote.daemon import CODEC, Daemon, Frames, ThroughFrames


class _RemoteContract(DriverContract):
    """Each test begins with an empty store; the daemon keeps one store open for all tests."""

    machine_examples = 3  # random walks over HTTP; another contract tests the store behind it
    opened: list[Subject]

    @pytest.fixture(autouse=True)
    def _empty(self, daemon: Daemon) -> Iterator[None]:
        self.opened = []
        yield
        for codec in {store.backend.codec.namespace: store.backend.codec for store in self.opened}.values():
            with contextlib.closing(store_of(RemoteDriver, codec, daemon.options())) as backend:
                backend.clear(deadline=soon())

    def keep(self, store: Subject) -> Subject:
        self.opened.append(store)
        return store

    def test_a_compressed_page_is_stored_counted_and_read_in_its_own_length(self, open_store: OpenStore) -> None:
        """The daemon has the codec's settings, and encodes pages: see `test_encodings.py`."""
        key = [b"k" * 32]
        require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()))
        require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=key))
        require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=key))
        require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE))

    def test_a_page_that_only_this_reader_cannot_use_is_a_hit(self, open_store: OpenStore) -> None:
        """Every daemon can use its stored pages; an engine needs no codec for them."""
        store, keys = open_store(CODEC), make_keys(2)
        packed = FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression())
        store_chain(store, keys)
        store.write(keys[1], sealed(packed, keys[1:], keys[0])[0])
        assert load(store, keys) == [HIT, HIT]
        store.backend.close()


def of_one_size(codec: FrameCodec) -> FrameCodec:
    """Return a codec with a namespace per page size: the contract uses one namespace for several sizes, a daemon
    cannot."""
    if codec.payload_bytes == PAYLOAD_BYTES:
        return codec
    namespace = hashlib.sha256(str(codec.payload_bytes).encode()).digest()
    return FrameCodec(namespace, codec.payload_bytes)


def require_refusal(open_store: OpenStore, codec: FrameCodec) -> None:
    with pytest.raises(ConfigError, match="belong to the daemon; move integrity and storage_format"):
        open_store(codec)


class TestRemoteFrames(_RemoteContract):
    @pytest.fixture
    def open_store(self, daemon: Daemon, memories: dict[int, Frames]) -> OpenStore:
        def open_it(codec: FrameCodec) -> Subject:
            codec = of_one_size(codec)
            size = codec.frame_bytes
            if size not in memories:
                memories[size] = Frames(MANY_PAGES + 50 if size < 1 << 20 else 8, size)
            backend = store_of(ThroughFrames, codec, daemon.options(), memories[size])
            return self.keep(daemon.door(backend, codec))

        return open_it


class TestRemoteBodies(_RemoteContract):
    @pytest.fixture
    def open_store(self, daemon: Daemon) -> OpenStore:
        def open_it(codec: FrameCodec) -> Subject:
            codec = of_one_size(codec)
            return self.keep(daemon.door(store_of(RemoteDriver, codec, daemon.options(tcp=True)), codec))

        return open_it
