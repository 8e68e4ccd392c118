"""What all development servers share: a process of their own, from "really serves" to "nothing is left".

Locking design: none. An object of this module belongs to one thread at a time; it may be a different one each time.
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
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

from ..config.addresses import check_port
from ..errors import BackendUnavailable, InvalidInput
from .launcher import launch
from .ports import free_ports, is_free, listening_ports

# The `type` and the `options` of a configuration's section `storage`.
Storage: TypeAlias = tuple[str, dict[str, Any]]
# A program and its arguments; and environment variables that it gets on top of this process's.
Command: TypeAlias = tuple[list[str], dict[str, str]]

# A port may be taken between its choice and the server's start; three times in a row is no accident.
_ATTEMPTS = 3
_POLL_S = 0.02
# From SIGKILL to the end of a process: only the kernel can take longer, and then nobody can help.
_KILL_WAIT_S = 10.0
_LOG_TAIL_BYTES = 2000
# A killed server's port may be busy for a moment.
_PORT_WAIT_S = 5.0


class DevService(ABC):
    """One or several servers that are started and stopped together. A context manager: started inside, gone after."""

    @abstractmethod
    def start(self) -> None:
        """Start, and block until it answers real requests.

        Raises ConfigError if something is not installed, BackendUnavailable with the end of the server's log if it
        does not come up; nothing is left then.
        """

    @abstractmethod
    def stop(self) -> None:
        """End it within a bounded time, and remove what it left behind. Does nothing if it is not running."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether all its processes exist (paused or not)."""

    @abstractmethod
    def storage(self, **extra: Any) -> Storage:
        """The type and the options with which a configuration uses this service; `extra` options are added.

        REQUIRES: started.
        """

    @abstractmethod
    def environ(self) -> dict[str, str]:
        """Environment variables, credentials among them, that users of `storage()` need."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServerGroup(DevService):
    """Servers that belong together, started one after the other and stopped in the opposite order."""

    servers: Sequence[DevServer]

    @abstractmethod
    def unite(self) -> None:
        """Make one service of the servers, all of which serve now. Raises BackendUnavailable if that fails."""

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
    """One server process on loopback ports, in a private directory of its own that goes with it.

    `port` fixes its (first) port, otherwise free ones are chosen. `data` keeps its files in a directory that stays;
    without it they are removed at the end. The process ends with the one that started it, even if that is killed.

    Raises InvalidInput for a port that is not between 1 and 65535.
    """

    name: ClassVar[str]
    # What the server listens on, the port that clients use first.
    port_names: ClassVar[tuple[str, ...]] = ("port",)
    start_timeout_s: ClassVar[float] = 30.0
    # How long it may take after SIGTERM before it is killed; 0 kills at once.
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
        # Files that the program leaves outside its directory, to be removed once it has ended.
        self.litter: list[Path] = []

    @abstractmethod
    def command(self) -> Command:
        """The program, its arguments and its environment, after writing the files that it needs.

        REQUIRES: ports and directories are known.
        """

    @abstractmethod
    def serves(self) -> bool:
        """Whether a real request is answered now. Blocks for a second at most; trouble is False."""

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
        """The server's private directory. REQUIRES: started and not stopped."""
        if self._directory is None:
            raise InvalidInput(f"{self.name}: is not started")
        return self._directory

    @property
    def data(self) -> Path:
        """Where the server keeps what it stores."""
        return self._given_data or self.directory / "data"

    @property
    def log(self) -> Path:
        """What the server prints."""
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
        chosen = bool(self.ports)  # a restart: clients know them
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
                raise BackendUnavailable(f"{self.name}: port {self._fixed_port} is taken; name another one")
            ports[0] = self._fixed_port
        return dict(zip(self.port_names, ports, strict=True))

    def _came_up(self) -> bool:
        deadline_s = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline_s and self.running:
            # Somebody else on the same port may answer just as well.
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
        """Stop the process where it stands (SIGSTOP): connections stay open and nothing is answered."""
        os.kill(self._running().pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        os.kill(self._running().pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process and its children at once (SIGKILL), as a crash would. Ports and directory stay."""
        process, self._process = self._running(), None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself, and so have its children
        process.wait(_KILL_WAIT_S)
        for path in self.litter:
            path.unlink(missing_ok=True)

    def restart(self, *, empty: bool = False) -> None:
        """Kill it if it runs, and start it again on the same ports, with what it has on disk or `empty`."""
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
