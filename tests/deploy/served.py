"""A daemon started as a deployment file starts it, with the directories and ports of the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.daemon.daemons import ROOT, Client
from tests.waiting import WAIT_S, wait_for

# The port that every deployment file names.
PORT = 9321
CONFIG = "/etc/hicache/daemon.yaml"


@dataclass(frozen=True, slots=True)
class Place:
    """The directories and the port that replace those of a deployment in a test."""

    folder: Path
    port: int

    @classmethod
    def make(cls, folder: Path) -> Place:
        """Make the directories as the deployment does."""
        for name in ("run", "lib", "etc"):
            (folder / name).mkdir(mode=0o700)
        return cls(folder, free_ports(1)[0])

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket."""
        return self.folder / "run/daemon.sock"

    def moved(self, text: str, **changes: str) -> str:
        """Return the text of a deployment file with this place's directories and port, and with `changes` from old to
        new text. Fails if an old text does not occur."""
        for old, new in {
            "/run/hicache/private/": f"{self.folder}/run/", "/run/hicache/": f"{self.folder}/run/",
            "/var/lib/hicache": f"{self.folder}/lib", "/etc/hicache": f"{self.folder}/etc",
            "0.0.0.0:": f"{LOOPBACK}:", f":{PORT}": f":{self.port}",
            # The pool is allocated at start, and the disk of a test may have less free space.
            **{f"pool: {size}GiB": "pool: 16MiB" for size in (1, 4, 16)},
            **{f"free_space_floor: {size}GiB": "free_space_floor: 0B" for size in (10, 50)},
        }.items():
            text = text.replace(old, new)
        for old, new in changes.items():
            assert old in text, f"the file no longer says {old}"
            text = text.replace(old, new)
        return text

    def get(self, path: str, *, port: int | None = None, token: str | None = None) -> int:
        """Make a request over the Unix socket, or over TCP with `port`. Return its status."""
        return get(self.socket if port is None else port, path, token=token)

    def is_ready(self) -> bool:
        """Return True if a daemon serves here."""
        return is_ready(self.socket)


def get(server: Path | int, path: str, *, token: str | None = None) -> int:
    """Make a request to a Unix socket or a port. Return its status."""
    client = Client(server) if isinstance(server, Path) else Client(None, server)
    with contextlib.closing(client):
        return int(client.call("GET", path, token=token)[0])


def is_ready(server: Path) -> bool:
    """Return True if a daemon serves at a Unix socket."""
    with contextlib.suppress(OSError):
        return get(server, "/readyz") == 200
    return False


@contextlib.contextmanager
def served(
    place: Place, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `hicache` with the arguments of a deployment and wait until it is ready. At the end, stop it with SIGTERM."""
    log_path = place.folder / "log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hicache", *(place.moved(argument) for argument in arguments)], cwd=ROOT,
            env=os.environ | dict(environ or {}), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )

    def require_running() -> None:
        assert process.poll() is None, log_path.read_text()

    try:
        wait_for(place.is_ready, require_running, pause_s=0.02)
        yield process
        require_running()
        process.terminate()
        assert process.wait(WAIT_S) == 0, log_path.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT_S)
