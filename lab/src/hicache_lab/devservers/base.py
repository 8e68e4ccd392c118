"""The base of all development servers: a process that is started, checked with real requests, and removed completely.

Locking design: no locks. One thread at a time uses an object of this module; threads may take turns.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from hicache.config.addresses import check_port
from hicache.errors import BackendUnavailable, InvalidInput

from .launcher import launch, suspend
from .ports import free_ports, is_free, listening_ports

# The `type` and the `options` of a configuration's section `storage`.
Storage: TypeAlias = tuple[str, dict[str, Any]]
# A program and its arguments, and variables that are added to the environment.
Command: TypeAlias = tuple[list[str], dict[str, str]]

# Another process may take a port between its choice and the server's start; three times in a row is another problem.
_ATTEMPTS = 3
_POLL_S = 0.02
# From SIGKILL to the end of a process. Only a process that hangs in the kernel takes longer.
_KILL_WAIT_S = 10.0
_LOG_TAIL_BYTES = 2000
# A killed server's port may be busy for a moment.
_PORT_WAIT_S = 5.0


class DevService(ABC):
    """One or several servers that are started and stopped together. A context manager."""

    @abstractmethod
    def start(self) -> None:
        """Start, and block until it answers real requests.

        Raises ConfigError if a program is not installed, and BackendUnavailable with the end of the server's log if it
        does not start. Leaves nothing behind after an error.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop it within a bounded time and remove its files. Does nothing if it is not running."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """True if all its processes exist (paused or not)."""

    @abstractmethod
    def storage(self, **extra: Any) -> Storage:
        """Return the type and the options for the configuration of a user; `extra` options are added.

        REQUIRES: started.
        """

    @abstractmethod
    def environ(self) -> dict[str, str]:
        """Return the environment variables, including credentials, that users of `storage()` need."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class ServerGroup(DevService):
    """Servers that belong together, started in order and stopped in reverse order."""

    servers: Sequence[DevServer]

    @abstractmethod
    def unite(self) -> None:
        """Connect the servers, all of which are serving, into one service. Raises BackendUnavailable."""

    def start(self) -> None:
        try:
            for server in self.servers:
                server.start()
            self.unite()
        except BaseException:
            self.stop()
            raise

    @property
    def running(self) -> bool:
        return all(server.running for server in self.servers)

    def stop(self) -> None:
        for server in reversed(self.servers):
            server.stop()


class DevServer(DevService):
    """One server process on loopback ports, in a private temporary directory.

    `port` sets its (first) port; otherwise free ports are chosen. `data` is a directory for its files, which stay;
    otherwise they are removed at the end. The process ends with its parent, even if that is killed.

    Raises InvalidInput for a port that is not between 1 and 65535.
    """

    name: ClassVar[str]
    # The ports that the server listens on; clients use the first.
    port_names: ClassVar[tuple[str, ...]] = ("port",)
    start_timeout_s: ClassVar[float] = 30.0
    # The time from SIGTERM to SIGKILL; with 0 it is killed at once.
    grace_s: ClassVar[float] = 3.0

    def __init__(self, *, port: int | None = None, data: Path | None = None) -> None:
        try:
            self._fixed_port = None if port is None else check_port(port)
        except ValueError as error:
            raise InvalidInput(f"{self.name}: {error}; got {port!r}") from error
        self._given_data = data
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self.ports: dict[str, int] = {}
        # Files that the program leaves outside its directory; removed after its end.
        self.litter: list[Path] = []

    @abstractmethod
    def command(self) -> Command:
        """Write the files that the program needs, and return it with its arguments and environment.

        REQUIRES: ports and directories are known.
        """

    @abstractmethod
    def serves(self) -> bool:
        """Return True if it answers a real request. Blocks for at most a second. Errors are False."""

    @property
    def port(self) -> int:
        """The port that clients use."""
        return self.ports[self.port_names[0]]

    @property
    def pid(self) -> int:
        """The server's process. REQUIRES: started."""
        return self._running().pid

    @property
    def directory(self) -> Path:
        """The server's private directory. REQUIRES: running."""
        if self._directory is None:
            raise InvalidInput(f"{self.name}: is not started")
        return self._directory

    @property
    def data(self) -> Path:
        """The directory of the server's data."""
        return self._given_data or self.directory / "data"

    @property
    def log(self) -> Path:
        """The file with the server's output."""
        return self.directory / "log"

    def start(self) -> None:
        if self._process is not None:
            raise InvalidInput(f"{self.name}: is started already")
        try:
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="hicache-dev-"))
            self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        chosen = bool(self.ports)  # a restart: clients use these
        for attempt in range(_ATTEMPTS):
            if not chosen:
                self.ports = self._choose_ports()
            arguments, environ = self.command()
            self._process = launch(arguments, environ={**os.environ, **environ}, directory=self.directory, log=self.log)
            if self._came_up():
                return
            failure = f"{self.name}: {self._failure()}; its log ends:\n{self._log_tail()}"
            self.kill()
            taken = not all(map(is_free, self.ports.values()))
            if chosen or not taken or attempt == _ATTEMPTS - 1:
                raise BackendUnavailable(failure)

    def _choose_ports(self) -> dict[str, int]:
        ports = free_ports(len(self.port_names))
        if self._fixed_port is not None:
            if not is_free(self._fixed_port):
                raise BackendUnavailable(f"{self.name}: port {self._fixed_port} is in use; choose another port")
            ports[0] = self._fixed_port
        return dict(zip(self.port_names, ports, strict=True))

    def _came_up(self) -> bool:
        deadline_s = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline_s and self.running:
            # Another program on the same port may have answered.
            if self.serves() and self.port in listening_ports(self.pid):
                return True
            time.sleep(_POLL_S)
        return False

    def _failure(self) -> str:
        code = self._running().poll()
        return f"did not serve within {self.start_timeout_s:g} s" if code is None else f"ended with exit code {code}"

    def _log_tail(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise InvalidInput(f"{self.name}: is not started")
        return self._process

    def pause(self) -> None:
        """Suspend the process (SIGSTOP): connections stay open and requests are not answered."""
        suspend(self._running().pid)

    def resume(self) -> None:
        """Continue a paused process."""
        os.kill(self._running().pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and its children (SIGKILL), as in a crash. Ports and directory stay."""
        process, self._process = self._running(), None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it and its children have already ended
        process.wait(_KILL_WAIT_S)
        for path in self.litter:
            path.unlink(missing_ok=True)

    def restart(self, *, empty: bool = False) -> None:
        """Kill it if it runs, and start it again on the same ports, with its data on disk or `empty`."""
        if self._process is not None:
            self.kill()
        if empty:
            shutil.rmtree(self.data, ignore_errors=True)
        deadline_s = time.monotonic() + _PORT_WAIT_S
        while not all(map(is_free, self.ports.values())) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._ask_to_end(self._process)
            self.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
        self.ports = {}

    def _ask_to_end(self, process: subprocess.Popen[bytes]) -> None:
        if not self.grace_s or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # it may be paused
        try:
            process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            pass  # killed next
