"""A TCP proxy that injects network faults in front of a real server.

    with Proxy(server.port) as proxy:
        ...use proxy.port instead of server.port...
        proxy.set(Faults(stall=Direction.DOWN))
        ...
        proxy.heal()

Faults apply to open and to new connections. When a stall is healed, the proxy forwards the bytes that it held back, as
on a network. A cut connection stays closed.

Locking design: all sockets belong to one thread with an event loop. Callers pass it a coroutine and wait until it has
run, so a fault is in force when `set` returns. The counters are single integers and are read without a lock.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from hicache_lab.devservers.ports import LOOPBACK, free_ports

_CHUNK_BYTES = 64 * 1024
# The chunks per direction that a slow or stalled proxy buffers before it stops reading: enough that latency alone
# hardly limits a fast sender, and little compared with a page.
_CHUNKS_MAX = 16
_WAIT_S = 60.0
# SO_LINGER with a time of zero: closing sends RST and drops unsent bytes.
_RESET = struct.pack("ii", 1, 0)

_T = TypeVar("_T")


class Direction(enum.Flag):
    """A direction of bytes."""

    NONE = 0
    UP = enum.auto()  # from the client to the server
    DOWN = enum.auto()  # from the server to the client
    BOTH = UP | DOWN


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a proxy; without arguments there are none. `direction` limits all except `stall` and `refuse`.

    `latency_s` delays each piece. `bytes_per_s` limits the rate of each connection. `slice_bytes` forwards pieces of at
    most that many bytes, one packet each. `stall` forwards nothing and leaves connections open. `cut_after_bytes` ends
    a connection after so many bytes (counted from `set` on), with RST if `reset`. `refuse` ends all connections and
    accepts no new ones.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    slice_bytes: int | None = None
    cut_after_bytes: int | None = None
    reset: bool = False
    stall: Direction = Direction.NONE
    direction: Direction = Direction.BOTH
    refuse: bool = False


_HEALTHY = Faults()


class Proxy:
    """Listens on a loopback port and forwards to the port `target`. With `tls`, it terminates TLS for an unencrypted
    server. For a Unix socket `target`, it listens on another socket in the same directory, `path`."""

    def __init__(self, target: int | Path, *, tls: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._tls = tls
        self.path = target.with_name("proxy.sock") if isinstance(target, Path) else None
        self.port = free_ports(1)[0]
        self.connections = 0  # accepted so far
        self.bytes_up = 0  # forwarded to the server so far
        self.bytes_down = 0  # forwarded to the client so far
        self._faults = _HEALTHY
        self._pairs: set[_Pair] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def open_connections(self) -> int:
        """The number of open connections of clients."""
        return len(self._pairs)

    def __enter__(self) -> Self:
        self._thread.start()
        self._await(self._listen())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._await(self._close())
        self._await(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    def set(self, faults: Faults) -> None:
        """Replace all faults by `faults`."""
        self._await(self._set(faults))

    def heal(self) -> None:
        """End all faults."""
        self.set(_HEALTHY)

    def drop(self, *, reset: bool = False) -> None:
        """End all open connections, with RST if `reset`. Accept new ones."""
        self._await(self._drop(reset))

    def forget(self, *, silently: bool = False) -> None:
        """Forget all open connections, as networks do: the next request on each is answered by RST, or `silently` not
        at all."""
        self._await(self._forget(silently))

    def _await(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_S)

    async def _listen(self) -> None:
        if self.path is not None:
            self._server = await asyncio.start_unix_server(self._serve, self.path, limit=_CHUNK_BYTES)
            return
        self._server = await asyncio.start_server(
            self._serve, LOOPBACK, self.port, ssl=self._tls, limit=_CHUNK_BYTES, backlog=256
        )

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target, limit=_CHUNK_BYTES)
        return await asyncio.open_connection(LOOPBACK, self._target, limit=_CHUNK_BYTES)

    async def _set(self, faults: Faults) -> None:
        self._faults = faults
        for pair in list(self._pairs):
            pair.set(faults)
        if faults.refuse:
            await self._close()
        elif self._server is None:
            await self._listen()

    async def _forget(self, silently: bool) -> None:
        for pair in self._pairs:
            if silently:
                pair.set(Faults(stall=Direction.BOTH))
            else:
                pair.set(Faults(cut_after_bytes=0, reset=True, direction=Direction.UP))

    async def _drop(self, reset: bool) -> None:
        dropped = set(self._pairs)
        for pair in dropped:
            pair.end(reset=reset)
        while dropped & self._pairs:
            await asyncio.sleep(0.001)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._drop(reset=False)

    async def _end_tasks(self) -> None:
        """Cancel the remaining tasks: connections that were being established during the close."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        # The client may have disconnected in the meantime.
        if self._faults.refuse or writer.transport.is_closing():
            writer.transport.abort()
            there_writer.close()
            return
        pair = _Pair(
            _Pipe(Direction.UP, reader, there_writer, self._count_up),
            _Pipe(Direction.DOWN, there_reader, writer, self._count_down),
        )
        pair.set(self._faults)
        self._pairs.add(pair)
        try:
            await pair.run()
        finally:
            self._pairs.discard(pair)

    def _count_up(self, count: int) -> None:
        self.bytes_up += count

    def _count_down(self, count: int) -> None:
        self.bytes_down += count


class _Cut(Exception):
    """Ends a connection now."""


class _Pipe:
    """One direction of one connection: reads into a bounded queue, and forwards from it as the faults allow."""

    def __init__(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], None],
    ) -> None:
        self._direction = direction
        self._reader = reader
        self.writer = writer
        self._count = count
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_MAX)
        self._faults = _HEALTHY
        self._changed = asyncio.Event()
        self._since_set_bytes = 0

    def set(self, faults: Faults) -> None:
        """Apply `faults` from the next piece on."""
        self._faults = faults if self._direction & faults.direction else Faults(stall=faults.stall)
        self._since_set_bytes = 0
        self._changed.set()

    async def read(self) -> None:
        """Fill the queue until the sender has ended. An empty piece marks the end."""
        loop = asyncio.get_running_loop()
        while True:
            piece = await self._reader.read(_CHUNK_BYTES)
            await self._queue.put((loop.time(), piece))
            if not piece:
                return

    async def write(self) -> None:
        """Forward the pieces of the queue until its end. Raises _Cut."""
        loop = asyncio.get_running_loop()
        while True:
            arrived_s, piece = await self._queue.get()
            await asyncio.sleep(max(0.0, arrived_s + self._faults.latency_s - loop.time()))
            if not piece:
                await self._while_stalled()
                self._end_of_stream()
                return
            while piece:
                await self._while_stalled()
                piece = await self._forward(piece)

    async def _while_stalled(self) -> None:
        while self._direction & self._faults.stall:
            self._changed.clear()
            await self._changed.wait()

    async def _forward(self, piece: bytes) -> bytes:
        """Write the first part of `piece`. Return the rest."""
        faults = self._faults
        now = piece[: faults.slice_bytes or len(piece)]
        if faults.cut_after_bytes is not None:
            now = now[: max(0, faults.cut_after_bytes - self._since_set_bytes)]
        if now:
            self.writer.write(now)
            await self.writer.drain()
            self._count(len(now))
            self._since_set_bytes += len(now)
        if faults.cut_after_bytes is not None and self._since_set_bytes >= faults.cut_after_bytes:
            raise _Cut
        if faults.bytes_per_s is not None:
            await asyncio.sleep(len(now) / faults.bytes_per_s)
        elif faults.slice_bytes is not None:
            await asyncio.sleep(0)  # let other connections run between small packets
        return piece[len(now) :]

    def _end_of_stream(self) -> None:
        if self.writer.can_write_eof():
            self.writer.write_eof()

    def close(self, *, reset: bool) -> None:
        """Close the socket to which this pipe writes."""
        connection: socket.socket | None = self.writer.get_extra_info("socket")
        if reset and connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.writer.transport.abort()
        else:
            self.writer.close()


class _Pair:
    """Both directions of one connection through the proxy."""

    def __init__(self, up: _Pipe, down: _Pipe) -> None:
        self._pipes = up, down
        self._faults = _HEALTHY
        self._ended = asyncio.Event()
        self._reset = False
        for pipe in self._pipes:
            connection = pipe.writer.get_extra_info("socket")
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, faults: Faults) -> None:
        self._faults = faults
        for pipe in self._pipes:
            pipe.set(faults)

    def end(self, *, reset: bool) -> None:
        """Make `run` close both sides."""
        self._reset = reset
        self._ended.set()

    async def run(self) -> None:
        """Forward until both sides have ended, one has failed, or a fault ends the connection. Then close both."""
        work = [flow for pipe in self._pipes for flow in (pipe.read(), pipe.write())]
        flows: asyncio.Future[Any] = asyncio.gather(*work)
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([flows, ended], return_when=asyncio.FIRST_COMPLETED)
            if flows.done():
                flows.result()
        except (OSError, _Cut) as error:
            # End the other side in the same way.
            self._reset = self._faults.reset if isinstance(error, _Cut) else isinstance(error, ConnectionResetError)
        finally:
            for task in (flows, ended):
                task.cancel()
            await asyncio.gather(flows, ended, return_exceptions=True)
            for pipe in self._pipes:
                pipe.close(reset=self._reset)
