"""What `tests.deploy.test_contained` runs in a container: a daemon, stopped and started again, and an engine's storage.

Usage: python -m tests.deploy.inside ENGINE_CONFIG ROOT_OF_PAGES COMMAND...
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hicache.backends.registry import BackendSpec, open_spec
from hicache.config import load_config
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, NAMESPACE, STORED, empty_frames, full_frames, holds, make_keys, soon
from tests.deploy.served import is_ready
from tests.waiting import WAIT_S, wait_for

PAYLOAD_BYTES = 5000
PAGES = 3
LOG = Path("/run/hicache/log")


def _run(engine: Path, root: Path, command: list[str], *, is_first: bool) -> None:
    """Run the daemon once: an engine stores pages in the first run, and the daemon reads them from its store in the
    second."""
    with LOG.open("ab") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    codec, keys = FrameCodec(NAMESPACE, PAYLOAD_BYTES), make_keys(PAGES)
    config = load_config(engine, environ={}, overrides={})
    assert config.storage is not None
    try:
        options = config.storage.options
        assert isinstance(options, RemoteStorageOptions) and options.socket is not None
        socket = options.socket
        wait_for(lambda: is_ready(socket) or daemon.poll() is not None, pause_s=0.02)
        backend = open_spec(BackendSpec.of(config.storage), codec)
        try:
            if is_first:
                stored = backend.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon())
                assert stored == [STORED] * PAGES
                wait_for(lambda: len(list(root.rglob("?" * 64 + "/??/" + "?" * 64))) == PAGES)
            frames = empty_frames(codec, PAGES)
            assert backend.batch_get(keys, frames, deadline=soon()) == [HIT] * PAGES
            assert all(holds(codec, key, frame) for key, frame in zip(keys, frames, strict=True))
        finally:
            backend.close()
        daemon.terminate()
        assert daemon.wait(WAIT_S) == 0
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()
        sys.stdout.write(LOG.read_text(encoding="utf-8"))


if __name__ == "__main__":
    _, engine_config, store, *arguments = sys.argv
    for number in range(2):
        _run(Path(engine_config), Path(store).expanduser(), arguments, is_first=number == 0)
