"""The backend `remote` against the contract: a real daemon, with shared frames and with page bodies."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import pytest

from hicache.backends.remote import RemoteBackend
from hicache.backends.testing import (
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    BackendContract,
    OpenStore,
    Store,
    load,
    make_keys,
    sealed,
    soon,
    store_chain,
)
from hicache.backends.testing.bounds import MANY_PAGES
from hicache.errors import ConfigError
from hicache.frame import Compression, FrameCodec, TagKind
from tests.backends.remote.daemon import CODEC, Daemon, Frames, ThroughFrames


class _RemoteContract(BackendContract):
    """Each test begins with an empty store, which the daemon keeps open for all of them."""

    machine_examples = 3  # random walks over HTTP; the store behind is the one of another contract
    opened: list[Store]

    @pytest.fixture(autouse=True)
    def _empty(self, daemon: Daemon) -> Iterator[None]:
        self.opened = []
        yield
        for codec in {store.backend.codec.namespace: store.backend.codec for store in self.opened}.values():
            with contextlib.closing(RemoteBackend(codec, daemon.options())) as backend:
                backend.clear(deadline=soon())

    def keep(self, store: Store) -> Store:
        self.opened.append(store)
        return store


    # The settings of a codec are the daemon's: what the contract says of them is in `test_encodings.py`.

    @pytest.mark.parametrize("name", ["plain"])
    def test_the_stored_object_is_the_sealed_page(self, open_store: OpenStore, name: str) -> None:
        super().test_the_stored_object_is_the_sealed_page(open_store, name)

    @pytest.mark.parametrize("name", ["plain"])
    def test_usage_follows_the_bytes_that_are_really_stored(self, open_store: OpenStore, name: str) -> None:
        super().test_usage_follows_the_bytes_that_are_really_stored(open_store, name)

    @pytest.mark.parametrize("name", ["plain"])
    def test_pages_in_parts_and_frames_are_the_same_pages(self, open_store: OpenStore, name: str) -> None:
        super().test_pages_in_parts_and_frames_are_the_same_pages(open_store, name)

    @pytest.mark.parametrize("name", ["zstd"])
    def test_damage_to_an_encoded_page_is_found_and_removed(self, open_store: OpenStore, name: str) -> None:
        require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()))

    @pytest.mark.parametrize("kind", ["mac_keys", "encryption_keys"])
    def test_only_pages_made_with_one_of_its_keys_are_believed(self, open_store: OpenStore, kind: str) -> None:
        key = [b"k" * 32]
        if kind == "mac_keys":
            require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=key))
        else:
            require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=key))

    def test_without_a_tag_a_flipped_payload_goes_through(self, open_store: OpenStore) -> None:
        require_refusal(open_store, FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE))

    def test_a_page_that_only_this_reader_cannot_use_is_a_miss_and_stays(self, open_store: OpenStore) -> None:
        """Every daemon can use what it stores: an engine needs no codec of its own."""
        store, keys = open_store(CODEC), make_keys(2)
        packed = FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression())
        store_chain(store, keys)
        store.write(keys[1], sealed(packed, keys[1:], keys[0])[0])
        assert load(store, keys) == [HIT, HIT]
        store.backend.close()


def of_one_size(codec: FrameCodec) -> FrameCodec:
    """A daemon has one size of pages in a namespace; the contract uses one for several."""
    if codec.payload_bytes == PAYLOAD_BYTES:
        return codec
    namespace = hashlib.sha256(str(codec.payload_bytes).encode()).digest()
    return FrameCodec(namespace, codec.payload_bytes)


def require_refusal(open_store: OpenStore, codec: FrameCodec) -> None:
    with pytest.raises(ConfigError, match="belong to the daemon"):
        open_store(codec)


class TestRemoteFrames(_RemoteContract):
    @pytest.fixture
    def open_store(self, daemon: Daemon, memories: dict[int, Frames]) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            codec = of_one_size(codec)
            size = codec.frame_bytes
            if size not in memories:
                memories[size] = Frames(MANY_PAGES + 50 if size < 1 << 20 else 8, size)
            backend = RemoteBackend(codec, daemon.options())
            backend.register_memory(memories[size].memory.frames)
            return self.keep(daemon.door(ThroughFrames(backend, memories[size]), codec))

        return open_it


class TestRemoteBodies(_RemoteContract):
    @pytest.fixture
    def open_store(self, daemon: Daemon) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            codec = of_one_size(codec)
            return self.keep(daemon.door(RemoteBackend(codec, daemon.options()), codec))

        return open_it


class TestRemoteTcp(_RemoteContract):
    @pytest.fixture
    def open_store(self, daemon: Daemon) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            codec = of_one_size(codec)
            return self.keep(daemon.door(RemoteBackend(codec, daemon.options(tcp=True)), codec))

        return open_it
