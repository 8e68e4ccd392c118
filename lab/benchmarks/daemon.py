"""A storage daemon beside the same store embedded in the engine's process: speed, processor time, steps, fairness.

    python -m lab.benchmarks.daemon [--seconds S] [--clients N] [--path DIRECTORY]

Starts its own daemons over stores in memory (tmpfs), so that no disk hides the cost of a request. The hit rates with
stores that are full or dead are in `daemon_hits`, and the steps of a scheduler in `daemon_steps`, which run at the end.

    same host       reads and writes of batches of 16 pages, file store, frames in shared memory. Both sides compute
                    and check a checksum for each page. Processor time is that of this process only
    lookup          500 keys, memory store, over the Unix socket
    TCP             page bodies on loopback, from and to the daemon's pool, beside a plain server that moves the same
                    bytes over as many connections
    clients         processes that read from the daemon's pool for some seconds, all in parallel
    file bodies     reading files that become bodies: worker threads beside aiofiles
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import http.client
import mmap
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import aiofiles
import yaml

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.file import FileDriver
from hicache.backends.remote import RemoteDriver
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.config.storage import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, unseal
from hicache.shared_memory import Layout, SharedMemory
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from lab.benchmarks._table import Row, print_table, rate_rows, reduced, row, timed

# These settings keep freed memory: memory returned to the machine is touched again at only 0.5 GB/s.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
_MIB, _GIB = 1 << 20, 1 << 30
_BATCH_PAGES = 16
_ROUNDS_MIN = reduced(5)
_KEYS = 500
_LOOKUPS = reduced(300, 2)
# Each connection is a thread on both sides: more threads than cores would only slow each other down.
_CONNECTIONS = min(4, os.cpu_count() or 1)
_CLIENT_PAGE_BYTES, _CLIENT_PAGES = 256 << 10, 8
_FOREVER_S = 600.0
_WAIT_S = 60.0
_TOKEN = "a-token-for-benchmarks-" + "0" * 16
# The goals of the project, as in docs/benchmarks.md.
_SPEED_GOAL, _CPU_GOAL, _TCP_GOAL, _FAIR_GOAL, _LOOKUP_LIMIT_US = 0.8, 0.25, 0.6, 2.0, 1000.0


class Daemon:
    """`hicache serve` in `folder`; `storage` is its section, None for the pool alone. A context manager."""

    def __init__(self, folder: Path, storage: dict[str, Any] | None, pool: str = "0B") -> None:
        folder.mkdir(mode=0o700)
        self.socket = folder / "run/daemon.sock"
        self.port = free_ports(1)[0]
        self.token = folder / "token"
        self.token.write_text(_TOKEN)
        self.token.chmod(0o600)
        config = folder / "daemon.yaml"
        sections = {} if storage is None else {"storage": storage}
        config.write_text(yaml.safe_dump({**sections, "daemon": {
            "socket": str(self.socket), "listen": f"{LOOPBACK}:{self.port}", "token_file": str(self.token),
            "pool": pool,
        }}))
        self._log = (folder / "log").open("wb")
        command = [sys.executable, "-m", "hicache", "serve", "-c", str(config)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Daemon:
        deadline_s = time.monotonic() + _WAIT_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the daemon does not start; see {self._log.name}")
            time.sleep(0.01)
        return self

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("localhost")
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
                sock.connect(str(self.socket))
                connection.sock = sock
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def open(self, codec: FrameCodec, memory: SharedMemory | None = None, *, tcp: bool = False) -> Store:
        """Return a store on it."""
        options = RemoteStorageOptions(socket=self.socket, connections=_CONNECTIONS)
        if tcp:
            url = f"http://{LOOPBACK}:{self.port}"
            options = RemoteStorageOptions(url=url, token_file=self.token, connections=_CONNECTIONS)
        store = Store(RemoteDriver(codec, options), codec, UNGUARDED)
        if memory is not None:
            store.register_memory(memory.frames)
        return store

    def peak_bytes(self) -> int:
        """Return the peak of its own memory, without frames of engines and files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


class Pages:
    """Frames of one size with content, in shared memory, and their keys. A context manager."""

    def __init__(self, page_bytes: int, count: int = _BATCH_PAGES) -> None:
        self.codec = FrameCodec(hashlib.sha256(str(page_bytes).encode()).digest(), page_bytes - HEADER_BYTES)
        self.size, self.bytes = self.codec.frame_bytes, self.codec.frame_bytes * count
        layout = Layout(0, count, self.size, bytes(32))
        self.memory = SharedMemory.open(f"benchmark-{os.getpid()}-{page_bytes}", layout, deadline=_soon())
        self.frames = [self.memory.frames[at * self.size : (at + 1) * self.size] for at in range(count)]
        for frame in self.frames:
            frame[:] = (os.urandom(4096) * (self.size // 4096 + 1))[: self.size]
        self.keys = [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(count)]

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.unlink()

    def write(self, backend: Storage) -> None:
        """Store the pages again, with new checksums."""
        outcomes = backend.batch_set(self.keys, self.frames, parent=None, deadline=_soon())
        assert outcomes == [SetOutcome.STORED] * len(self.keys), backend.statistics()

    def read(self, backend: Storage) -> None:
        """Read the pages."""
        outcomes = backend.batch_get(self.keys, self.frames, deadline=_soon())
        assert outcomes == [GetOutcome.HIT] * len(self.keys), backend.statistics()

    def forget(self, backend: Storage) -> None:
        """Remove the pages from the store and mark the frames as new."""
        backend.delete(self.keys, deadline=_soon())
        for frame in self.frames:
            unseal(frame)


def _soon() -> float:
    return time.monotonic() + _FOREVER_S


def file_storage(path: Path) -> dict[str, Any]:
    """Return the section of a file store without limits."""
    return {"type": "file", "options": {"path": str(path), "capacity": None, "free_space_floor": 0}}


def same_host(folder: Path, page_bytes: int, seconds: float) -> list[Row]:
    """Return speed and processor time of this process for reads and writes, daemon and embedded store in turns."""
    times: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    storage = file_storage(folder / "served")
    with Daemon(folder / "daemon", storage) as daemon, Pages(page_bytes) as pages:
        options = FileStorageOptions(path=folder / "embedded", capacity=None, free_space_floor=0)
        embedded = Store(FileDriver(pages.codec, options), pages.codec, UNGUARDED)
        sides: dict[str, Storage] = {"ours": daemon.open(pages.codec, pages.memory), "plain": embedded}
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or len(times["read ours"]) <= _ROUNDS_MIN:
            for side, backend in sides.items():
                pages.forget(backend)
                for verb, work in (("write", pages.write), ("read", pages.read)):
                    began_s = time.process_time()
                    times.setdefault(f"{verb} {side}", []).append(timed(lambda w=work, b=backend: w(b)))  # type: ignore[misc]
                    if len(times[f"{verb} {side}"]) > 1:
                        cpu[f"{verb} {side}"] = cpu.get(f"{verb} {side}", 0.0) + time.process_time() - began_s
        for backend in sides.values():
            backend.close()
    rounds = len(times["read ours"]) - 1
    for found in times.values():
        del found[0]  # the first round touches memory for the first time
    label = f"{page_bytes // _MIB} MiB"
    rows = [one for one in rate_rows(label, pages.bytes, times, _SPEED_GOAL) if "median" in one.what]
    for verb in ("read", "write"):
        ours, plain = (cpu[f"{verb} {side}"] / (pages.bytes * rounds / _GIB) for side in ("ours", "plain"))
        text = f"{verb} {label}, processor time of the engine per GiB"
        rows.append(Row(text, f"{1e3 * ours:.1f} ms", f"{1e3 * plain:.1f} ms", ours / plain, _CPU_GOAL))
    return rows


def lookups(folder: Path) -> list[Row]:
    """Return the row of lookups of 500 stored keys, memory store."""
    with Daemon(folder / "daemon", {"type": "memory"}) as daemon, Pages(4096, _KEYS) as pages:
        backend = daemon.open(pages.codec, pages.memory)
        pages.write(backend)
        taken = [timed(lambda: backend.batch_exists(pages.keys, deadline=_soon())) for _ in range(_LOOKUPS)]
        assert backend.batch_exists(pages.keys, deadline=_soon()) == _KEYS
        backend.close()
    return [row(f"lookup of {_KEYS} keys", [taken], limit_us=_LOOKUP_LIMIT_US)]


def tcp(folder: Path, seconds: float) -> list[Row]:
    """Return rows of page bodies on loopback, from and to the pool: a store would add its own time."""
    times: dict[str, list[float]] = {}
    served = Daemon(folder / "daemon", None, "256MiB")
    with served as daemon, Pages(2 * _MIB) as pages, _PlainServer() as plain:
        backend = daemon.open(pages.codec, tcp=True)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or len(times["read ours"]) <= _ROUNDS_MIN:
            pages.forget(backend)
            for verb, ours in (("write", pages.write), ("read", pages.read)):
                times.setdefault(f"{verb} ours", []).append(timed(lambda w=ours: w(backend)))  # type: ignore[misc]
                times.setdefault(f"{verb} plain", []).append(timed(lambda v=verb: plain.move(v, pages.frames)))  # type: ignore[misc]
        backend.close()
    label = f"2 MiB over TCP, {_CONNECTIONS} connections"
    return [one for one in rate_rows(label, pages.bytes, times, _TCP_GOAL) if "median" in one.what]


class _PlainServer:
    """A process that sends and receives pages: a request is one byte and the number of bytes. A context manager;
    `move` is the client, with one thread per connection."""

    def __enter__(self) -> _PlainServer:
        listener = socket.create_server((LOOPBACK, 0))
        self._process = multiprocessing.get_context("fork").Process(target=_serve_plain, args=(listener,), daemon=True)
        self._process.start()
        self._connections = [socket.create_connection(listener.getsockname()) for _ in range(_CONNECTIONS)]
        listener.close()
        self._threads = ThreadPoolExecutor(_CONNECTIONS)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def move(self, verb: str, frames: Sequence[memoryview]) -> None:
        """Read into or write from frames."""

        def part(number: int) -> None:
            connection, mine = self._connections[number], list(frames[number::_CONNECTIONS])
            size = sum(frame.nbytes for frame in mine)
            head = verb[:1].encode() + size.to_bytes(8, "big")
            if verb == "write":
                connection.sendall(head)
                for frame in mine:
                    connection.sendall(frame)
                assert connection.recv(1) == b"w"
                return
            connection.sendall(head)
            for frame in mine:
                _receive(connection, frame)

        list(self._threads.map(part, range(_CONNECTIONS)))


def _serve_plain(listener: socket.socket) -> None:
    def serve(connection: socket.socket) -> None:
        memory = memoryview(mmap.mmap(-1, 64 * _MIB))
        head = bytearray(9)
        while True:
            _receive(connection, memoryview(head))
            size = int.from_bytes(head[1:], "big")
            if head[:1] == b"w":
                _receive(connection, memory[:size])
                connection.sendall(b"w")
            else:
                connection.sendall(memory[:size])

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target, min(len(target), _MIB), socket.MSG_WAITALL)
        if not count:
            raise EOFError
        target = target[count:]


def clients(folder: Path, count: int, seconds: float) -> list[Row]:
    """Return rows of processes that read the same pages from the daemon's pool in parallel for some seconds, each into
    its own frames."""
    context = multiprocessing.get_context("fork")
    with Daemon(folder / "daemon", file_storage(folder / "served"), pool="64MiB") as daemon:
        with Pages(_CLIENT_PAGE_BYTES, _CLIENT_PAGES) as pages:
            backend = daemon.open(pages.codec, pages.memory)
            pages.write(backend)
            backend.close()
        before = daemon.peak_bytes()
        pipes: list[Connection] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=_read_for, args=(daemon, number, seconds, theirs), daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        done: list[tuple[int, float, int]] = [pipe.recv() for pipe in pipes]
        grown = daemon.peak_bytes() - before
    batches, slowest, failed = [one[0] for one in done], max(one[1] for one in done), sum(one[2] for one in done)
    moved = sum(batches) * _CLIENT_PAGES * _CLIENT_PAGE_BYTES / seconds
    fairness = max(batches) / max(1, min(batches))
    return [
        Row(f"{count} clients, most : fewest batches", str(max(batches)), str(min(batches)), fairness, _FAIR_GOAL),
        Row(f"{count} clients together", f"{moved / 1e9:.2f} GB/s"),
        Row("slowest batch of all", f"{1e3 * slowest:.0f} ms"),
        Row("batches that failed", str(failed), "0"),
        Row("memory that the daemon has grown by", f"{grown / _MIB:.0f} MiB"),
    ]


def _read_for(daemon: Daemon, number: int, seconds: float, pipe: Connection) -> None:
    with Pages(_CLIENT_PAGE_BYTES, _CLIENT_PAGES) as pages:
        backend = daemon.open(pages.codec, pages.memory)
        pipe.send("ready")
        pipe.recv()
        end_s, batches, failed, slowest_s = time.monotonic() + seconds, 0, 0, 0.0
        while (began_s := time.monotonic()) < end_s:
            outcomes = backend.batch_get(pages.keys, pages.frames, deadline=_soon())
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            if outcomes == [GetOutcome.HIT] * len(outcomes):
                batches += 1
            else:
                failed += 1
        pipe.send((batches, slowest_s, failed))
        backend.close()


def file_bodies(folder: Path) -> list[Row]:
    """Return the row of reading 16 files of 2 MiB for bodies: worker threads into existing memory, and aiofiles."""
    paths = [folder / str(number) for number in range(_BATCH_PAGES)]
    for path in paths:
        path.write_bytes(os.urandom(2 * _MIB))
    targets = [memoryview(mmap.mmap(-1, 2 * _MIB)) for _ in paths]

    def read_one(number: int) -> None:
        descriptor = os.open(paths[number], os.O_RDONLY)
        try:
            assert os.preadv(descriptor, [targets[number]], 0) == 2 * _MIB
        finally:
            os.close(descriptor)

    async def read_all() -> None:
        async def one(number: int) -> None:
            async with aiofiles.open(paths[number], "rb") as file:
                assert await file.readinto(targets[number]) == 2 * _MIB

        await asyncio.gather(*map(one, range(_BATCH_PAGES)))

    times: dict[str, list[float]] = {"read ours": [], "read other": []}
    with ThreadPoolExecutor(4) as threads:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(4))
        for _ in range(20):
            times["read ours"].append(timed(lambda: list(threads.map(read_one, range(_BATCH_PAGES)))))
            times["read other"].append(timed(lambda: loop.run_until_complete(read_all())))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    ours, other = (_BATCH_PAGES * 2 * _MIB / statistics.median(taken) / 1e9 for taken in times.values())
    return [Row("file bodies: worker threads, beside aiofiles", f"{ours:.2f} GB/s", f"{other:.2f} GB/s", ours / other)]


@contextlib.contextmanager
def folder_in(path: str | None) -> Iterator[Path]:
    """A new directory below `path`, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path) as made:
        yield Path(made)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=reduced(50) / 10, help="of each table with rounds")
    parser.add_argument("--clients", type=int, default=reduced(64, 2))
    parser.add_argument("--path", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _MALLOC.items()):
        os.execve(sys.executable, [sys.executable, "-m", "lab.benchmarks.daemon", *sys.argv[1:]], os.environ | _MALLOC)
    seconds = arguments.seconds
    parts: list[Callable[[Path], list[Row]]] = [
        lambda folder: clients(folder, arguments.clients, seconds),
        lambda folder: same_host(folder, 2 * _MIB, seconds),
        lambda folder: same_host(folder, 8 * _MIB, seconds),
        lookups,
        lambda folder: tcp(folder, seconds),
        file_bodies,
    ]
    rows: list[Row] = []
    for part in parts:
        with folder_in(arguments.path) as folder:
            rows += part(folder)
    print_table("Daemon (reference: the same store in this process, a plain server, or the limit)", rows)
    # In separate processes: one loads PyTorch, and must not inherit the memory of these benchmarks.
    subprocess.run([sys.executable, "-m", "lab.benchmarks.daemon_hits"], check=True)
    subprocess.run([sys.executable, "-m", "lab.benchmarks.daemon_steps"], check=True)


if __name__ == "__main__":
    main()
