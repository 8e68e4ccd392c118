"""A log never contains secrets, tokens, prompts, salts or whole keys.

The tests run a cache and a daemon with faults, and search each line that they log at level DEBUG.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from hicache.backends.memory import MemoryDriver
from hicache.backends.opening import StorageOpener
from hicache.backends.pages import PageReads
from hicache.backends.store import Store
from hicache.cache.report import CacheLog
from hicache.config import HiCacheConfig
from hicache.config.guard import GuardConfig
from hicache.frame import FrameCodec
from hicache.keys import RadixKey
from hicache.logs import set_up_logging, shortened
from hicache_lab.conformance import NAMESPACE as NAMESPACE_DIGEST
from hicache_lab.conformance import PAYLOAD_BYTES, empty_frames, make_keys, soon
from tests.cache.world import GEOMETRY, NAMESPACE, World
from tests.daemon.daemons import NAMESPACE as NAMESPACE_OF_DAEMON
from tests.daemon.daemons import TOKEN, Daemon, keys_of, write
from tests.tuned import tuned
from tests.waiting import wait_for

MAC_KEY = "5ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2"
SALT = "salt-of-tenant-9"
TOKENS = np.arange(7_654_300, 7_654_320)  # no other log text contains these numbers
WHOLE_KEY = re.compile(r"[0-9a-fA-F]{64}")


@pytest.fixture
def written() -> io.StringIO:
    """Capture all log lines of the package."""
    stream = io.StringIO()
    set_up_logging("debug", "text", stream)
    return stream


def found_secrets(text: str, *secrets: str) -> list[str]:
    return [secret for secret in secrets if secret.lower() in text.lower()] + WHOLE_KEY.findall(text)


def damage_all(folder: Path) -> int:
    """Overwrite some bytes of each page of a file store. Return the number of pages."""
    pages = [path for path in folder.rglob("*") if path.is_file() and WHOLE_KEY.fullmatch(path.name)]
    for path in pages:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(300)
            file.write(b"damage" * 3)
        assert path.stat().st_size == size
    return len(pages)


def test_the_log_of_a_cache_with_faults_has_no_secret(tmp_path: Path, written: io.StringIO) -> None:
    config = HiCacheConfig.model_validate({
        "page_size": 4, "integrity": {"mac_key_env": "MAC"},
        "storage": {"type": "file", "options": {"path": str(tmp_path / "pages"), "free_space_floor": "0B"},
                    "guard": tuned(GuardConfig, retry_share=0.0, damage_pages=2)},
    })
    opener = StorageOpener(config, {"MAC": MAC_KEY})
    codec = opener.codec(NAMESPACE.digest, GEOMETRY.payload_bytes, weights_epoch=0, label="llama")
    key = RadixKey.of(TOKENS, cache_salt=SALT)
    with contextlib.closing(World(backend=opener.open(codec))) as world:
        log = CacheLog(config, NAMESPACE, world.cache.statistics, world.controller.clock)
        world.serve("one", key)
        world.until(lambda: world.controller.idle)
        assert damage_all(tmp_path / "pages") == 5
        world.cache.clear()
        world.serve("two", key)
        wait_for(lambda: "the breaker for reads opened (damage)" in written.getvalue(), world.step)
        log.close()
    text = written.getvalue()
    assert "failed verification (tag)" in text and "cache started" in text
    tokens = [str(token) for token in TOKENS]
    assert found_secrets(text, MAC_KEY, SALT, key.seed.hex(), *tokens) == []


class RaisesKeys(MemoryDriver):
    """A driver whose exceptions contain a whole key."""

    def read(self, pages: PageReads[bytes]) -> None:
        raise KeyError(pages.keys[0].hex())


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_key_in_the_exception_of_a_backend_is_shortened(form: str, written: io.StringIO) -> None:
    set_up_logging("debug", form, written)
    codec = FrameCodec(NAMESPACE_DIGEST, PAYLOAD_BYTES)
    (key,) = make_keys(1)
    with contextlib.closing(Store(RaisesKeys(), codec, name="raises")) as guard:
        guard.batch_get([key], empty_frames(codec, 1), deadline=soon())
    assert f"KeyError: '{key.hex()[:8]}...'" in written.getvalue()
    assert found_secrets(written.getvalue()) == []
    assert found_secrets(f"KeyError: '{key.hex()}'") == [key.hex()]  # the control
    assert shortened("ab" * 33) == "ab" * 33  # 66 digits are not a key


def test_a_message_with_a_line_break_is_one_line(written: io.StringIO) -> None:
    logging.getLogger("hicache").warning("label %s", "x\n2026-01-01T00:00:00.000Z INFO hicache: all is well\r")
    assert len(written.getvalue().splitlines()) == 1


def test_the_log_of_a_daemon_with_faults_has_no_secret(scratch: Path) -> None:
    path = scratch / "pages"
    daemon = Daemon(scratch)
    daemon.configure(
        {"token_file": daemon.secret("token", TOKEN), "pool": "0B"},
        logging={"level": "debug"}, integrity={"mac_key_env": "MAC"},
        storage={"type": "file", "options": {"path": str(path), "free_space_floor": "0B"}},
    )
    daemon.environ = {"MAC": MAC_KEY}
    daemon.start()
    try:
        keys = keys_of(GuardConfig.damage_pages)
        with contextlib.closing(daemon.client()) as client:
            assert client.open()[0] == 200
            assert write(client, keys)[1]["outcomes"] == ["stored"] * len(keys)
            assert damage_all(path) == len(keys)
            assert client.verb("read", keys=keys)[0] == 200
            assert client.call("POST", "/v1/namespaces/" + "cd" * 32 + "/exists", {"keys": []})[0] in (404, 422)
        with contextlib.closing(daemon.tcp()) as stranger:
            usage = f"/v1/namespaces/{NAMESPACE_OF_DAEMON}/usage"
            assert stranger.call("GET", usage, token="a-wrong-token")[0] == 401
        wait_for(lambda: "the breaker for reads opened (damage)" in daemon.log)
        assert daemon.stop() == 0
        assert re.search(r"page [0-9a-f]{8} of tests failed verification .* \[request [0-9a-f-]+\]", daemon.log)
        assert "1 requests came without the token" in daemon.log
        assert found_secrets(daemon.log, MAC_KEY, TOKEN, "a-wrong-token") == []
    finally:
        daemon.kill()
