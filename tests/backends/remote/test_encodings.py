"""The daemon defines how pages are stored: MACs, encryption and compression, for engines without any of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.remote import RemoteDriver
from hicache.backends.testing import (
    CORRUPT,
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    load,
    make_keys,
    store_chain,
    store_of,
)
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError
from hicache.frame import Compression, FrameCodec, FrameHeader
from tests.backends.remote.daemon import CODEC, Daemon, Frames, ThroughFrames

KEY = b"k" * 32
FORMS = {
    "gmac": (
        {"integrity": {"mac_key_file": "key"}}, FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[KEY]),
    ),
    "zstd+gcm": (
        {"storage_format": {"encryption_key_file": "key", "compression": "zstd"}},
        FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[KEY], compression=Compression()),
    ),
}  # fmt: skip


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
