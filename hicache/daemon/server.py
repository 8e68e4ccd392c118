"""The daemon's process: its listeners, signals, and the order of starting and ending.

Locking design: all of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ..admin.sockets import BACKLOG, PrivateSocket
from ..config.addresses import default_socket
from ..config.daemon import DaemonConfig
from ..errors import ConfigError
from .app import create_app
from .history import SAMPLE_S, FaultKind, History
from .node import Node
from .statistics import NodeState

logger = logging.getLogger(__name__)

# How often it looks for engines that died. A restarted engine waits for that before it opens its memory again.
_TEND_S = 0.25
_STOPPED_BY = (signal.SIGTERM, signal.SIGINT)


def serve(node: Node) -> None:
    """Serve `node` until SIGTERM or SIGINT. Raises ConfigError if it cannot listen. REQUIRES: the main thread."""
    uvloop.run(Server(node).run())


def socket_path(config: DaemonConfig) -> Path:
    """Return the path of the Unix socket. Raises ConfigError if the system has no private directory for it."""
    path = config.socket or default_socket()
    if path is None:
        raise ConfigError("daemon.socket: XDG_RUNTIME_DIR is not set; give a path in a directory of yours, mode 0700")
    return path


class Server:
    """See the module's docstring."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._config = node.config.daemon
        self._stopping = asyncio.Event()
        self._state = ServerState()
        self._history = History()
        self._uvicorn = uvicorn.Config(
            create_app(node, self._history), http="httptools", ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, date_header=False,
        )  # fmt: skip

    async def run(self) -> None:
        """Listen, serve, and drain at the end."""
        self._uvicorn.load()
        loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            path = socket_path(self._config)
            unix = undo.enter_context(PrivateSocket(path, "daemon.socket", lock=path.with_name("lock")))
            listeners = [await loop.create_server(self._protocol, sock=unix.socket, backlog=BACKLOG)]
            address = self._config.address
            if address is not None:
                listeners.append(await loop.create_server(self._protocol, address.host, address.port, backlog=BACKLOG))
            for number in _STOPPED_BY:
                loop.add_signal_handler(number, self._stopping.set)
            self._node.state = NodeState.READY
            logger.info("serving at %s", ", ".join(_names(listeners)))
            undo.callback(loop.create_task(self._record()).cancel)
            await self._until_stopped()
            self._node.state = NodeState.DRAINING
            for listener in listeners:
                listener.close()
            await self._drain()

    def _protocol(self) -> asyncio.Protocol:
        return HttpToolsProtocol(config=self._uvicorn, server_state=self._state, app_state={})

    async def _until_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            for name in await loop.run_in_executor(None, self._node.memories.tend):
                logger.warning("memory %s: its engine has died; the memory was unmapped and its file removed", name)
                self._history.note(FaultKind.CLIENT, name)
            try:
                await asyncio.wait_for(self._stopping.wait(), _TEND_S)
            except TimeoutError:
                pass

    async def _record(self) -> None:
        """Take a sample for the page, every few seconds."""
        loop = asyncio.get_running_loop()
        while True:
            self._history.record(await loop.run_in_executor(None, self._node.statistics))
            await asyncio.sleep(SAMPLE_S)

    async def _drain(self) -> None:
        deadline = time.monotonic() + self._config.drain_timeout
        for connection in list(self._state.connections):
            connection.shutdown()
        while self._state.tasks and time.monotonic() < deadline:
            await asyncio.wait(self._state.tasks, timeout=deadline - time.monotonic())
        await asyncio.get_running_loop().run_in_executor(None, self._node.close, deadline)


def _names(listeners: list[asyncio.Server]) -> list[str]:
    names = []
    for listener in listeners:
        for sock in listener.sockets:
            name = sock.getsockname()
            names.append(str(name) if sock.family == socket.AF_UNIX else f"{name[0]} port {name[1]}")
    return names
