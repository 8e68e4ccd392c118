"""A daemon with traffic, for tests of its page and metrics: two engines share it, and one of its stores can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from hicache.backends.remote import RemoteDriver
from hicache.backends.store import Store
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.frame import FrameCodec
from hicache.keys import PAGE_KEY_BYTES
from hicache_lab.conformance import empty_frames, full_frames, make_keys, soon, store_of
from hicache_lab.devservers.ports import LOOPBACK
from tests.daemon.daemons import Daemon

PAGE_BYTES = 256 << 10
# The label of an engine is untrusted text for the page.
MARKUP = "<img src=x onerror=alert(1)><b>x"  # the daemon removes the part of a label before the last slash
LABELS = ("llama-3-70b tp0", MARKUP)


class BusyDaemon(Daemon):
    """A daemon in `folder` over two levels, a small store and `shared`, with its page at `url`. The engines have the
    labels `labels`; `section` adds entries to the section `daemon`."""

    def __init__(self, folder: Path, labels: tuple[str, ...] = LABELS, small: str = "nvme", **section: Any) -> None:
        levels = []
        for name, capacity in ((small, "64MiB"), ("shared", "256MiB")):
            options = {"path": str(folder / name), "capacity": capacity, "free_space_floor": "0B"}
            levels.append({"name": name, "type": "file", "options": options})
        storage = {"type": "levels", "options": {"levels": levels}}
        super().__init__(folder, {"pool": "16MiB", "staging": "64MiB", **section}, storage=storage)
        self.labels = labels
        self.target = f"{LOOPBACK}:{self.port}"
        self.url = f"http://{self.target}/"
        self._served = 0

    def listen_everywhere(self) -> None:
        """Change the configuration to listen on all addresses. REQUIRES: the daemon is not started yet."""
        text = self.config_file.read_text()
        self.config_file.write_text(text.replace(self.target, self.target.replace(LOOPBACK, "0.0.0.0")))

    def break_shared(self) -> None:
        """Make calls to `shared` fail until `repair_shared`."""
        (self.folder / "shared").rename(self.folder / "away")

    def repair_shared(self) -> None:
        """Make `shared` work again."""
        (self.folder / "away").rename(self.folder / "shared")

    @contextmanager
    def engine(self, label: str) -> Iterator[Store]:
        """Yield a client with a namespace derived from `label`. Its pages travel as bodies over the Unix socket."""
        codec = FrameCodec(label.encode().ljust(PAGE_KEY_BYTES, b".")[:PAGE_KEY_BYTES], PAGE_BYTES, label=label)
        with closing(store_of(RemoteDriver, codec, RemoteStorageOptions(socket=self.socket))) as backend:
            yield backend

    def serve(self, engines: int = 2, rounds: int = 3, pages: int = 16) -> None:
        """Let each engine store and read batches, and look for unknown pages. Each call uses new pages."""
        self._served += 1
        with ExitStack() as stack:
            for backend in [stack.enter_context(self.engine(label)) for label in self.labels[:engines]]:
                for number in range(rounds):
                    keys = make_keys(pages, f"chain{self._served}/{number}")
                    frames = full_frames(backend.codec, keys)
                    backend.batch_set(keys, frames, parent=None, deadline=soon())
                    unknown = make_keys(pages // 4, f"unknown{self._served}/{number}")
                    for requested in (keys, unknown, keys[: pages // 2]):
                        backend.batch_get(requested, empty_frames(backend.codec, len(requested)), deadline=soon())
