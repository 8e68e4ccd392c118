"""The Redis backend against a plain recv_into / sendall loop, and the cost of a lookup of 500 pages.

    python -m lab.benchmarks.redis_backend [--seconds S] [--page-kib N ...] [--batch-mib N] [--only PLACE]
        [--peer WHEELS]

Starts its own Valkey server (extra `dev-servers`), with the same number of connections for all sides. The first table
is over a Unix socket. The second is over TCP, with small pages, and LMCache's client beside ours if it is installed or
if WHEELS is the directory of its unpacked wheel (`_peers`); it has no other transport.

The plain loop knows the length of each value in advance and only moves bytes. Ours also looks pages up, pipelines,
checks each length, and computes and checks the integrity tag. The `redis` package (GET and SET of single pages on as
many threads) copies. LMCache's client checks nothing. The sides take turns in one process. It prints best and median of
the rounds; above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache.backends.redis import RedisDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.config.redis_storage import RedisStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, unseal
from hicache_lab.devservers import ValkeyServer
from lab.benchmarks._peers import LMCACHE, redis_peers
from lab.benchmarks._table import Row, print_table, rate_rows, reduced, timed
from lab.benchmarks.engines._sides import with_malloc

_KIB = 1 << 10
_MIB = 1 << 20
_CONNECTIONS = 2
_LARGE_KIB = (256, 2048, 8192)
_PLACES = {"socket": _LARGE_KIB, "tcp": (4, 64, 256, 2048)}
_PAGES_MAX = 512
_ROUNDS_MAX = reduced(40, 2)
_ROUNDS_MIN = 4
_FOREVER_S = 600.0
_LOOKUP_KEYS = 500
_LOOKUP_ROUNDS = reduced(200, 2)
_LOOKUP_LIMIT_S = 1e-3
_NAME = "plain:%06d"


class _Plain:
    """A connection that knows the length of each value."""

    def __init__(self, address: str | tuple[str, int], size: int) -> None:
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)
        else:
            self._socket = socket.create_connection(address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = memoryview(bytearray(len(b"$%d\r\n" % size)))
        self._end = memoryview(bytearray(5))

    def set(self, name: bytes, frame: memoryview) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(frame))
        self._socket.sendall(head)
        self._socket.sendall(frame)
        self._socket.sendall(b"\r\n")
        self._receive(self._end)
        assert bytes(self._end) == b"+OK\r\n"

    def get(self, name: bytes, frame: memoryview) -> None:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        self._receive(self._head)
        self._receive(frame)
        self._receive(self._end[:2])

    def _receive(self, target: memoryview) -> None:
        got = 0
        while got < len(target):
            got += self._socket.recv_into(target[got:])

    def close(self) -> None:
        self._socket.close()


class RedisBench:
    """One page size: buffers, and the sides."""

    def __init__(
        self, server: ValkeyServer, page_bytes: int, batch: int, tcp: bool, *, connections: int = _CONNECTIONS,
        wheels: str | None = None,
    ) -> None:
        self.codec = FrameCodec(b"b" * 32, page_bytes - HEADER_BYTES)
        size = self.codec.frame_bytes
        self._map = mmap.mmap(-1, size * batch)
        whole = memoryview(self._map)
        for start in range(0, len(whole), _MIB):
            end = min(start + _MIB, len(whole))
            whole[start:end] = (os.urandom(4096) * (_MIB // 4096))[: end - start]
        self.frames = [whole[i * size : (i + 1) * size] for i in range(batch)]
        self.keys = [i.to_bytes(4, "big") * 8 for i in range(batch)]
        self.names = [(_NAME % i).encode() for i in range(batch)]
        _, options = (server.storage if tcp else server.unix_storage)(connections=connections)
        self.backend = Store(RedisDriver(self.codec, RedisStorageOptions(**options)), self.codec, UNGUARDED)
        address = ("127.0.0.1", server.port) if tcp else str(server.unix_socket)
        self._plain = [_Plain(address, size) for _ in range(connections)]
        place: dict[str, Any] = {} if tcp else {"unix_socket_path": str(server.unix_socket)}
        self.client = server.client(socket_timeout=60.0, **place)
        self.peers = redis_peers(wheels, server.port, self.frames, connections) if tcp else {}

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.backend.close()
        self.client.close()
        for connection in self._plain:
            connection.close()

    @property
    def bytes(self) -> int:
        return self.codec.frame_bytes * len(self.frames)

    def _in_threads(self, work: Callable[[int, int], None]) -> None:
        share = -(-len(self.frames) // len(self._plain))

        def loop(thread: int) -> None:
            for i in range(thread * share, min((thread + 1) * share, len(self.frames))):
                work(thread, i)

        helpers = [threading.Thread(target=loop, args=(n,)) for n in range(1, len(self._plain))]
        for helper in helpers:
            helper.start()
        loop(0)
        for helper in helpers:
            helper.join()

    def plain_write(self) -> None:
        self._in_threads(lambda thread, i: self._plain[thread].set(self.names[i], self.frames[i]))

    def plain_read(self) -> None:
        self._in_threads(lambda thread, i: self._plain[thread].get(self.names[i], self.frames[i]))

    def our_write(self) -> None:
        outcomes = self.backend.batch_set(self.keys, self.frames, parent=None, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"stored"}, outcomes

    def our_read(self) -> None:
        outcomes = self.backend.batch_get(self.keys, self.frames, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"hit"}, outcomes

    def package_write(self) -> None:
        self._in_threads(lambda thread, i: self.client.set(self.names[i], self.frames[i]))

    def package_read(self) -> None:
        def read(thread: int, i: int) -> None:
            self.frames[i][:] = self.client.get(self.names[i])

        self._in_threads(read)

    def sides(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return a write and a read of each side."""
        return {
            "ours": (self.our_write, self.our_read),
            "plain": (self.plain_write, self.plain_read),
            **{who: (peer.write, peer.read) for who, peer in self.peers.items()},
        }

    def clear(self) -> None:
        self.client.flushdb()
        for frame in self.frames:
            unseal(frame)


def _measure(bench: RedisBench, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per batch of each side and direction, in turns."""
    sides = bench.sides() | {"package": (bench.package_write, bench.package_read)}
    times: dict[str, list[float]] = {f"{verb} {side}": [] for side in sides for verb in ("write", "read")}
    end = time.monotonic() + seconds
    for number in range(_ROUNDS_MAX):
        if number > _ROUNDS_MIN and time.monotonic() >= end:
            break
        # The order changes: each side finds the server's memory as the previous one left it.
        first = number % len(sides)
        for side in (*list(sides)[first:], *list(sides)[:first]):
            bench.clear()
            write, read = sides[side]
            times[f"write {side}"].append(timed(write))
            times[f"read {side}"].append(timed(read))
    return {what: took[1:] for what, took in times.items()}  # the first round warms up


def _lookup_row(server: ValkeyServer, tcp: bool) -> Row:
    """Return the row of a lookup of pages that are all stored, the slowest case."""
    bench = RedisBench(server, 4096, _LOOKUP_KEYS, tcp)
    try:
        bench.clear()
        bench.our_write()
        times = []
        for _ in range(_LOOKUP_ROUNDS):
            start = time.perf_counter()
            found = bench.backend.batch_exists(bench.keys, deadline=start + _FOREVER_S)
            times.append(time.perf_counter() - start)
            assert found == _LOOKUP_KEYS
    finally:
        bench.close()
    median = statistics.median(times)
    return Row(f"lookup of {_LOOKUP_KEYS} pages, median of {_LOOKUP_ROUNDS} (best {min(times) * 1e6:.0f} us), time",
               f"{median * 1e6:.0f} us", f"{_LOOKUP_LIMIT_S * 1e6:.0f} us", _LOOKUP_LIMIT_S / median, 1.0)


def run(
    *, page_kib: Sequence[int] = _LARGE_KIB, batch_mib: int = 128, seconds: float = 12.0, tcp: bool = False,
    wheels: str | None = None,
) -> list[Row]:
    """Measure on a new server; about `seconds` per page size. `wheels` is the directory of LMCache's unpacked wheel."""
    rows: list[Row] = []
    others = (("plain", 0.85), ("package", None), *(((LMCACHE, 1.0),) if tcp else ()))
    with ValkeyServer() as server:
        for kib in page_kib:
            batch = max(2 * _CONNECTIONS, min(_PAGES_MAX, batch_mib * _KIB // kib))
            bench = RedisBench(server, kib * _KIB, batch, tcp, wheels=wheels)
            try:
                times = _measure(bench, seconds)
                for other, goal in others:
                    rows += rate_rows(f"{batch} x {kib} KiB, {other}", bench.bytes, times, goal, other=other)
            finally:
                bench.close()
        rows.append(_lookup_row(server, tcp))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Redis backend against a plain loop")
    parser.add_argument("--seconds", type=float, default=8.0, help="per page size; there are seven")
    parser.add_argument("--page-kib", type=int, nargs="+", help="pages of both tables")
    parser.add_argument("--batch-mib", type=int, default=128)
    parser.add_argument("--only", choices=list(_PLACES), help="one of the two tables")
    parser.add_argument("--peer", help="directory with LMCache's unpacked wheel, for the table over TCP")
    options = parser.parse_args()
    with_malloc("lab.benchmarks.redis_backend")
    for place in [options.only] if options.only else _PLACES:
        rows = run(
            page_kib=(options.page_kib or _PLACES[place])[: reduced(4)], batch_mib=options.batch_mib,
            seconds=options.seconds, tcp=place == "tcp", wheels=options.peer,
        )
        words = "TCP" if place == "tcp" else "a Unix socket"
        print_table(f"Redis backend against other clients, {_CONNECTIONS} connections, {words}", rows)


if __name__ == "__main__":
    main()
