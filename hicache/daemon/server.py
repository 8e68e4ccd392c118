"""The daemon's process: its listeners, its signals, and the order of start and end.

    start     reads tokens and certificates, touches the pool's memory, takes the lock, reads the history, then listens
    SIGHUP    reads the configuration again and applies changes (`reload`)
    SIGTERM   accepts no more connections, saves the history, lets requests end within `drain_timeout`, closes stores

Locking design: everything runs on the event loop's thread; blocking calls, also those on files, run on threads of the
loop's executor. Requests use the tokens that `_watch` has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import uvicorn
import uvloop
from uvicorn.server import ServerState

from .. import tracing
from ..admin.access import AdminAccess
from ..admin.sockets import BACKLOG, PrivateSocket
from ..backends.rotated import Rotated
from ..cache.report import DropLog, dropped_by_stores, stores_of
from ..config import HiCacheConfig
from ..config.addresses import default_socket, is_loopback
from ..errors import ConfigError
from ..shared_memory import remove_dead
from ..units import format_size
from .app import create_app
from .connection import Connection, Listener, Shared
from .gate import Gate
from .history import SAMPLE_S, FaultKind, History
from .history_file import HistoryFile
from .node import Node
from .protocol import KEYS_MAX
from .reload import apply
from .security import Tokens, open_tls, open_tokens
from .staging import Staging
from .statistics import LIMITS, NodeState

logger = logging.getLogger(__name__)

# The interval of checks for dead engines, and for replaced tokens and certificates. A restarted engine waits for one
# before it opens its memory again.
_TEND_S = 0.25
# The interpreter's switch interval: the default of 5 ms is several times as long as a lookup.
_SWITCH_INTERVAL_S = 0.0005
_STOPPED_BY = (signal.SIGTERM, signal.SIGINT)


def serve(load: Callable[[], HiCacheConfig], environ: Mapping[str, str] | None = None) -> None:
    """Serve the configuration of `load` until SIGTERM or SIGINT; SIGHUP calls `load` again. Raises ConfigError if the
    configuration is rejected or an address cannot be bound. REQUIRES: the main thread."""
    environ = os.environ if environ is None else environ
    config = load()
    if config.tracing.enabled:
        tracing.enable(exports=True)
    node = Node(config, environ)
    server = Server(node, load, environ)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(server.run())
    finally:
        node.close(node.clock())
        tracing.shut_down()


class Server:
    """See the module's docstring. Raises ConfigError for unreadable secrets."""

    def __init__(self, node: Node, load: Callable[[], HiCacheConfig], environ: Mapping[str, str]) -> None:
        config = node.config.daemon
        self._node = node
        self._load = load
        self._environ = environ
        self._manager = ServiceManager(environ)
        self._stopping = asyncio.Event()
        self._draining = asyncio.Event()
        self._reload_asked = asyncio.Event()
        self._state = ServerState()
        self._tokens = open_tokens(config, environ)
        self._tls = open_tls(config.tls)
        self._listeners: list[asyncio.Server] = []  # the Unix socket, then TCP
        self._tcp: tuple[Listener, socket.socket, ssl.SSLContext | None] | None = None
        self._history = History(node.clock)
        staging = Staging(config.staging, node.clock)
        app = create_app(node, staging, self._history, AdminAccess(lambda: self._tokens.value.admin))
        gate = Gate(app, node, lambda: self._tokens.value.data)
        http = uvicorn.Config(gate, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
                              server_header=False, date_header=False)
        threads = ThreadPoolExecutor(config.connections_max, thread_name_prefix="hicache-body")
        bytes_max = staging.piece_max() + KEYS_MAX * 32
        self._shared = Shared(config, http, self._state, node.calls, threads, bytes_max)
        self._shared.uvicorn.load()

    async def run(self) -> None:
        """Listen, serve, and drain at the end."""
        # uvicorn would log each invalid request; they are counted instead.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        _raise_descriptor_limit()
        async with AsyncExitStack() as undo:
            path = self._shared.config.socket or default_socket(self._environ)
            if path is None:
                raise ConfigError("daemon.socket: XDG_RUNTIME_DIR is not set; set a path in a directory of mode 0700")
            unix = await asyncio.to_thread(PrivateSocket, path, "daemon.socket", lock=path.with_name("lock"))
            undo.push_async_callback(asyncio.to_thread, unix.close)
            file = HistoryFile(path.with_name("history.json"), self._history)
            await file.load()
            self._listeners.append(await self._listen(Listener(True, True, False, False), unix.socket, None))
            address = self._shared.config.address
            if address is not None:
                kind = Listener(False, is_loopback(address.host), self._tls is not None,
                                self._shared.config.tls.client_ca is not None)
                tcp = undo.enter_context(await asyncio.to_thread(_tcp_socket, address.host, address.port))
                tls = None if self._tls is None else self._tls.value
                self._listeners.append(await self._listen(kind, tcp.dup(), tls))
                self._tcp = kind, tcp, tls
            self._handle_signals()
            undo.callback(DropLog(self._dropped, LIMITS, clock=self._node.clock).close)
            self._node.state = NodeState.READY
            where = ", ".join(map(_name, self._listeners))
            logger.info("daemon: serving at %s (%s)", where, _described(self._node))
            self._manager.notify("READY=1")
            saving = asyncio.create_task(file.keep(self._draining))
            try:
                await self._until_stopped()
            finally:  # also after an error: the lock is released only after the last access to engines' memory
                if not self._stopping.is_set():
                    logger.critical("daemon: stopping after an unexpected error", exc_info=True)
                self._manager.notify("STOPPING=1")
                self._node.state = NodeState.DRAINING
                logger.info("daemon: draining for at most %s s", self._shared.config.drain_timeout)
                for listener in self._listeners:
                    listener.close()
                self._draining.set()
                await self._drain(saving)
            logger.info("daemon: ended")

    def _dropped(self) -> Counter[str]:
        """Return the work that limits have dropped, for the log. Not on the event loop's thread."""
        found = Counter(self._node.calls.refused)
        for one in self._node.statistics().namespaces:
            found.update(dropped_by_stores(one.stores, one.copies))
        return found

    async def _listen(self, kind: Listener, sock: socket.socket, tls: ssl.SSLContext | None) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self._shared, kind), sock=sock, ssl=tls, backlog=BACKLOG,
            ssl_handshake_timeout=self._shared.config.client_timeout if tls else None,
        )

    async def _renew(self) -> None:
        """Use the tokens and certificates whose files have changed. Listen with other certificates; connections stay. A
        new context also prevents that a client resumes a session which the previous authorities allowed."""
        await asyncio.to_thread(self._tokens.get)
        if self._tcp is None or self._tls is None:
            return
        kind, tcp, before = self._tcp
        tls = await asyncio.to_thread(self._tls.get)
        if tls is not before:
            with contextlib.suppress(OSError):  # out of descriptors: the next round tries again
                listener = await self._listen(kind, tcp.dup(), tls)
                self._listeners[-1].close()
                self._listeners[-1], self._tcp = listener, (kind, tcp, tls)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOPPED_BY:
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload_asked.set)

    async def _reload(self) -> None:
        """Apply a changed configuration. A rejected one changes nothing."""
        self._manager.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._tokens, self._tls, now, later = await asyncio.to_thread(self._read_again)
        except ConfigError as error:
            logger.error("daemon: reload refused, nothing was changed: %s", error)
        else:
            self._shared.config = self._node.config.daemon
            logger.info("daemon: reloaded; changed: %s", ", ".join(now) or "no entry")
            if later:
                logger.warning("daemon: restart it to change: %s", ", ".join(later))
        self._manager.notify("READY=1")

    def _read_again(self) -> tuple[Rotated[Tokens], Rotated[ssl.SSLContext] | None, list[str], list[str]]:
        """Read the configuration and its secrets, and apply it to the node. Blocks. Raises ConfigError."""
        new = self._load()
        tokens, tls = open_tokens(new.daemon, self._environ), open_tls(self._node.config.daemon.tls)
        return tokens, tls, *apply(self._node, new)

    async def _until_stopped(self) -> None:
        """Handle engines, history, files and the service manager until a signal."""
        watchdog_s = self._manager.watchdog_s
        tasks = [asyncio.create_task(one) for one in (self._stopping.wait(), self._tend(), self._watch())]
        try:
            done = set[asyncio.Task[object]]()
            while not done:
                if watchdog_s:
                    self._manager.notify("WATCHDOG=1")
                done, _ = await asyncio.wait(tasks, timeout=watchdog_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _tend(self) -> None:
        """Unmap the memory of dead engines, which takes as long as the system needs to free it, and take a sample."""
        loop = asyncio.get_running_loop()
        sampled_s = -math.inf
        while True:
            for name in await loop.run_in_executor(None, self._node.memories.tend):
                logger.warning("memory %s: its engine died; the memory was unmapped, and its file removed unless "
                               "host.shared.keep is set", name)
                self._history.note(FaultKind.CLIENT, name)
            if self._node.clock() - sampled_s >= SAMPLE_S:
                sampled_s = self._node.clock()
                await loop.run_in_executor(None, remove_dead)  # of engines that died while no daemon ran
                self._history.record(await loop.run_in_executor(None, self._node.statistics))
            await asyncio.sleep(_TEND_S)

    async def _watch(self) -> None:
        """Reload the configuration after SIGHUP, and use replaced tokens and certificates. A task of its own: a file
        system that hangs does not keep `_tend` from its work."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TEND_S):
                    await self._reload_asked.wait()
            if self._reload_asked.is_set():
                self._reload_asked.clear()
                # asyncio logs an unexpected exception, which must not end a daemon that serves.
                await asyncio.wait([asyncio.create_task(self._reload())])
            await self._renew()

    async def _drain(self, saving: asyncio.Task[None]) -> None:
        clock = self._node.clock
        deadline = clock() + self._shared.config.drain_timeout
        for connection in list(self._state.connections):
            connection.shutdown()
        while self._state.tasks and clock() < deadline:
            await asyncio.wait(self._state.tasks, timeout=deadline - clock())
        for connection in list(self._state.connections):
            connection.transport.abort()
        late = len(self._state.tasks)
        if late:
            logger.warning("daemon: %s requests did not end in time; their connections were closed", late)
        closing = asyncio.get_running_loop().run_in_executor(None, self._node.close, deadline)
        _, hanging = await asyncio.wait([closing, saving], timeout=max(0.5, deadline - clock()))
        if late or hanging:
            # Threads that hang in a store would keep the process alive; their writes are whole or absent in any case.
            tracing.shut_down()
            logging.shutdown()
            os._exit(0 if self._stopping.is_set() else 1)


class ServiceManager:
    """Notifies systemd of the daemon's state (sd_notify(3)): a datagram to the socket `NOTIFY_SOCKET`.

    Does nothing without a service manager. Does not block.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket
            self._address = "\0" + self._address[1:]
        is_watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environ.get("WATCHDOG_USEC", "") if is_watched else ""
        # Half of the watchdog's timeout.
        self.watchdog_s = int(watchdog_us) / 2e6 if watchdog_us.isdecimal() and int(watchdog_us) else None

    def notify(self, state: str) -> None:
        """Report a state in the words of sd_notify(3)."""
        if not self._address:
            return
        # An error means that the service manager is being restarted; its successor keeps its records.
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as out:
            out.sendto(state.encode(), self._address)


def _tcp_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # of a name's look-up
        raise ConfigError(
            f"daemon.listen: cannot listen on {host} port {port}: {reason}; stop the program that uses it, or use an "
            "address of this host and a free port"
        ) from error


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors: a shell's limit is below the daemon's number of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _described(node: Node) -> str:
    pool, staging = format_size(node.pool.capacity_bytes), format_size(node.config.daemon.staging)
    return f"pool {pool}, staging {staging}, storage {stores_of(node.config.storage)}"


def _name(listener: asyncio.Server) -> str:
    sock = listener.sockets[0]
    name = sock.getsockname()
    return str(name) if sock.family == socket.AF_UNIX else f"{name[0]} port {name[1]}"
