"""The backend `remote` against the contract: a real daemon, with shared frames and with page bodies. The daemon defines
how pages are stored: MACs, encryption and compression, for engines without any of them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.remote import RemoteDriver
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError
from hicache.frame import Compression, FrameCodec, FrameHeader, TagKind
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    DriverContract,
    OpenStore,
    Subject,
    full_frames,
    load,
    make_keys,
    sealed,
    soon,
    store_chain,
    store_of,
)
from hicache_lab.conformance.bounds import MANY_PAGES
from tests.backends.remote.daemon import CODEC, Daemon, Frames, ThroughFrames
from tests.clocks import At


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
        """The daemon has the codec's settings, and encodes pages."""
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


KEY = b"k" * 32
FORMS = {
    "gmac": (
        {"integrity": {"mac_key_file": "key"}}, FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[KEY]),
    ),
    "zstd+gcm": (
        {"storage_format": {"encryption_key_file": "key", "compression": "zstd"}},
        FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[KEY], compression=Compression()),
    ),
}


@pytest.fixture(params=FORMS)
def keyed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Daemon, FrameCodec]]:
    """A daemon with a key, and a codec with the same key."""
    sections, codec = FORMS[request.param]
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    places = {name: {**section} for name, section in sections.items()}
    for section in places.values():
        section.update({entry: str(tmp_path / place) for entry, place in section.items() if place == "key"})
    with Daemon(tmp_path, **places) as made:
        yield made, codec


def test_pages_are_stored_as_the_daemon_defines_and_read_without_a_key(
    keyed: tuple[Daemon, FrameCodec], frames: Frames
) -> None:
    daemon, codec = keyed
    in_frames = store_of(ThroughFrames, CODEC, daemon.options(), frames)
    doors = [daemon.door(in_frames), daemon.door(store_of(RemoteDriver, CODEC, daemon.options()))]
    keys = [make_keys(4, name) for name in ("frames", "bodies")]
    for door, chain in zip(doors, keys, strict=True):
        assert store_chain(door, chain) == [STORED] * 4
        for key, above in zip(chain, [None, *chain], strict=False):
            raw = door.read(key)
            assert raw is not None and codec.check(key, memoryview(raw)) is None
            header = FrameHeader.parse(raw)
            assert header is not None and header.parent_key == (above or bytes(32))
    for door in doors:
        assert [load(door, chain) for chain in keys] == [[HIT] * 4] * 2
    forged = bytes(CODEC.seal(keys[0][1], memoryview(bytearray(CODEC.frame_bytes)), parent=keys[0][0]))
    for door in doors:
        door.write(keys[0][1], forged)
        assert load(door, keys[0]) == [HIT, CORRUPT, HIT, HIT]
        assert dict(door.backend.statistics().corrupt) == {"daemon": 1}
        assert store_chain(door, keys[0])[1] is STORED
    for door in doors:
        door.backend.close()


def test_the_daemon_stores_an_old_page_as_a_new_one_and_a_copy_of_it_as_old(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "store"), "free_space_floor": 0, "max_age": "1h"}
    old, keys = FrameCodec(NAMESPACE, PAYLOAD_BYTES, clock=At(time.time() - 7200.0)), make_keys(4)
    with Daemon(tmp_path, storage={"type": "file", "options": options}) as daemon:
        door = daemon.door(store_of(RemoteDriver, CODEC, daemon.options()))
        frames = full_frames(old, keys)
        for key, frame in zip(keys, frames, strict=True):
            old.seal(key, frame)
        copies = [old.copy_in(frame) for frame in frames[:2]]
        assert door.backend.batch_set(keys[:2], copies, parent=None, deadline=soon()) == [STORED] * 2
        assert door.backend.batch_set(keys[2:], frames[2:], parent=None, deadline=soon()) == [STORED] * 2
        assert load(door, keys) == [MISS, MISS, HIT, HIT]
        door.backend.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"socket": "/run/x.sock", "url": "https://host:1"}, "at most one of socket, url"),
        ({"url": "ftp://host"}, "url: a URL must look like"),
        ({"url": "https://host/path"}, "use only the host and the port"),
        ({"url": "http://host", "token_env": "TOKEN"}, "in clear text over a network"),
        ({"url": "https://host", "certificate": "c.pem"}, "set both or neither"),
        ({"socket": "/run/x.sock", "ca_file": "c.pem"}, "need a url"),
    ],
)
def test_options_that_cannot_work_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HiCacheConfig(storage={"type": "remote", "options": options})
