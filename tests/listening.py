"""A listener on a free port of a loopback address that serves each connection on its own thread: a simulated server.
And ports that are held for other servers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from hicache_lab.devservers.ports import LOOPBACK

# Attempts to find consecutive ports.
_ATTEMPTS = 100


@contextlib.contextmanager
def held_ports(count: int = 1) -> Iterator[int]:
    """Yield the first of `count` consecutive loopback ports. Until the context ends, each of them is bound and does not
    listen: the kernel gives it to no other socket, but a server that is told the port and sets SO_REUSEADDR can listen
    on it."""
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            first = 0
            for number in range(count):
                holder = sockets.enter_context(socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((LOOPBACK, first + number if first else 0))
                first = first or int(holder.getsockname()[1])
            held = sockets.pop_all()
            break
    else:
        raise OSError(f"found fewer than {count} consecutive free ports")
    with held:
        yield first


class Listener:
    """Listens at `host` until `close`. `serve` gets each connection and its number, from 1 on; it may end with an
    OSError.

    Locking design: `_lock` guards the sockets, the threads and the counters; no other lock is taken under it.
    """

    def __init__(self, serve: Callable[[socket.socket, int], None], host: str = LOOPBACK) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0  # accepted so far
        self.ended = 0  # connections that have ended
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more connections, end the open ones, and wait for their threads."""
        self._shut(self._listener)
        self._threads[0].join()
        self._listener.close()
        with self._lock:
            for sock in self._open:
                self._shut(sock)
        for thread in self._threads:
            thread.join()

    def also_end(self, sock: socket.socket) -> None:
        """Make `close` end this socket too, such as a TLS socket over a connection."""
        with self._lock:
            self._open.add(sock)

    @staticmethod
    def _shut(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with self._lock:
                    self.connections += 1
                    self._open.add(sock)
                    thread = threading.Thread(target=self._run, args=(sock, self.connections), daemon=True)
                    self._threads.append(thread)
                thread.start()

    def _run(self, sock: socket.socket, number: int) -> None:
        try:
            with contextlib.suppress(OSError):
                self._serve(sock, number)
        finally:
            sock.close()
            with self._lock:
                self._open.discard(sock)
                self.ended += 1
