"""The attacks of hostile clients on a daemon. Each takes a running daemon, counts the answers by status, and fails for
an unexpected one. The daemon is started with `BOUNDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hicache.daemon.protocol import KEYS_MAX
from hicache.shared_memory import Layout, SharedMemory, path_of

from .daemons import NAMESPACE
from .process import Daemon, answer_of, request

# Short timeouts, so that the attacks reach them soon; few connections, so that an attack can use them all.
BOUNDS: dict[str, Any] = {
    "client_timeout": "500ms", "connections_max": 100, "drain_timeout": "2s",
}
OPEN = f"/v1/namespaces/{NAMESPACE}"
PAYLOAD_BYTES = 5000
FRAME_BYTES = 8192
CONNECTIONS = 2000
Answers = Counter[int]
Attack = Callable[[Daemon, random.Random], Answers]


def keys_of(count: int, dice: random.Random) -> list[str]:
    return [dice.randbytes(32).hex() for _ in range(count)]


def send_raw(daemon: Daemon, *pieces: bytes, pause_s: float = 0.0) -> int:
    """Send `pieces`. Return the status of the answer, 0 if there is none."""
    with daemon.connect() as sock:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                sock.sendall(piece)
            if pause_s:
                time.sleep(pause_s)
        return answer_of(sock)[0]


def own(dice: random.Random) -> str:
    """Return a name of shared memory that another process with the same seed does not use."""
    return f"{dice.randrange(1 << 40)}-{os.getpid()}"


@contextlib.contextmanager
def memory(name: str, pages: int = 8) -> Iterator[SharedMemory]:
    """Yield shared memory of this process, like that of an engine."""
    layout = Layout(0, pages, FRAME_BYTES, bytes(32))
    shared = SharedMemory.open(name, layout, deadline=time.monotonic() + 10.0)
    try:
        yield shared
    finally:
        shared.unlink()
        shared.close()


def attach(daemon: Daemon, shared: SharedMemory, **other: Any) -> tuple[int, dict[str, Any]]:
    device, inode = shared.identity
    body = {"frame_bytes": FRAME_BYTES, "pages": shared.layout.pages, "device": device, "inode": inode, **other}
    return daemon.call("PUT", f"/v1/memory/{shared.name}", body)


def open_namespace(daemon: Daemon) -> None:
    assert daemon.call("PUT", OPEN, {"payload_bytes": PAYLOAD_BYTES})[0] == 200


# HTTP


def absurd_lengths(daemon: Daemon, dice: random.Random) -> Answers:
    """Send lengths that are too large, negative, invalid or repeated, and endless chunks."""
    found: Answers = Counter()
    post = f"POST {OPEN}/exists HTTP/1.1\r\nhost: localhost\r\n".encode()
    lengths = [b"999999999999", b"18446744073709551615", b"99999999999999999999999", b"-1", b"0x10", b"1e9", b"4, 4",
               b"4\r\ncontent-length: 5", b" ", b"4\r\ntransfer-encoding: chunked"]
    for length in lengths:
        found[send_raw(daemon, post + b"content-length: " + length + b"\r\n\r\n{}")] += 1
    write = f"POST {OPEN}/write?count=1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n".encode()
    found[send_raw(daemon, write)] += 1
    chunked = post + b"transfer-encoding: chunked\r\n\r\n"
    found[send_raw(daemon, chunked, b"ffffffffffffffff\r\n")] += 1
    found[send_raw(daemon, chunked, b"7fffffff\r\n", *[b"x" * 65536] * 64)] += 1
    found[send_raw(daemon, chunked, *[b"10000\r\n" + b" " * 65536 + b"\r\n"] * 64)] += 1
    assert set(found) <= {0, 400, 413, 422, 431}, found
    return found


def heads(daemon: Daemon, dice: random.Random) -> Answers:
    """Send heads that are too long, that never end, or that are noise."""
    found: Answers = Counter()
    for piece in (
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * (1 << 20),
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
        dice.randbytes(4096), b"\r\n" * 100_000, b"\x16\x03\x01" + dice.randbytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"\0" * 100_000,
    ):
        found[send_raw(daemon, piece)] += 1
    assert set(found) <= {0, 200, 400, 404, 405, 431}, found
    return found


def slow_clients(daemon: Daemon, dice: random.Random) -> Answers:
    """Send heads and bodies that stop, or continue byte by byte."""
    found: Answers = Counter()
    body = json.dumps({"keys": keys_of(4, dice), "timeout_s": 5}).encode()
    whole = request("POST", f"{OPEN}/exists", body)
    socks = [daemon.connect() for _ in range(40)]
    head_bytes = len(whole) - len(body)
    for number, sock in enumerate(socks):
        sock.sendall(whole[: (number * 37) % head_bytes if number % 2 else head_bytes + number])
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        for sock in socks[::4]:
            with contextlib.suppress(OSError):
                sock.send(b"x")
        time.sleep(0.05)
    for sock in socks:
        found[answer_of(sock)[0]] += 1
        sock.close()
    assert set(found) <= {0, 400}, found
    return found


def many_connections(daemon: Daemon, dice: random.Random) -> Answers:
    """Open far more connections than the limit, and send nothing."""
    found: Answers = Counter()
    socks: list[socket.socket] = []
    refused = 0
    for _ in range(CONNECTIONS):
        try:
            sock = daemon.connect(5.0)
        except OSError:
            refused += 1
            continue
        socks.append(sock)
        if len(socks) > 500:
            socks.pop(0).close()
    for sock in socks:
        found[answer_of(sock)[0]] += 1
        sock.close()
    assert set(found) <= {0, 503}, found
    found[-1] = refused
    return found


def floods(daemon: Daemon, dice: random.Random) -> Answers:
    """Send thousands of requests on one connection, and requests that do not wait for answers."""
    found: Answers = Counter()
    ask = request("GET", "/livez")
    with daemon.connect() as sock:
        for _ in range(2000):
            sock.sendall(ask)
            found[answer_of(sock)[0]] += 1
    for _ in range(10):
        with daemon.connect() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(request("GET", "/statusz") + ask * 1000)
            while (status := answer_of(sock)[0]) not in {0, 400}:
                found[status] += 1
            found[status] += 1
    assert set(found) <= {0, 200, 400}, found
    return found


def strange_json(daemon: Daemon, dice: random.Random) -> Answers:
    """Send bodies of the wrong shape, depth, type or length."""
    found: Answers = Counter()
    keys = keys_of(3, dice)
    bodies: list[bytes] = [b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 20_000, b"1e999999"]
    for timeout in ("-1", "0", "NaN", "Infinity", "1e400", '"5"', "null", "true", "1" + "0" * 5000):
        bodies.append(b'{"keys": [], "timeout_s": %s}' % timeout.encode())
    wrong: list[Any] = [
        [keys[0][:-1]], [keys[0] + "0"], [keys[0].upper() + "g"], ["../../etc/passwd"], [None], [1], "x" * 64, {},
        [[keys[0]]], keys_of(1, dice) * (KEYS_MAX + 1), ["\0" * 64], ["é" * 64],
    ]
    for some in wrong:
        bodies.append(json.dumps({"keys": some, "timeout_s": 1}).encode())
    bodies.append(json.dumps({"keys": keys, "timeout_s": 1, "more": 1}).encode())
    for body in bodies:
        for verb in ("exists", "delete", "read"):
            found[send_raw(daemon, request("POST", f"{OPEN}/{verb}", body))] += 1
    assert set(found) <= {400, 413, 422}, found
    return found


# Frames and memory


def foreign_frames(daemon: Daemon, dice: random.Random) -> Answers:
    """Name frames of another client, missing ones, and one twice."""
    found: Answers = Counter()
    name, other = f"b{own(dice)}", f"c{own(dice)}"
    with memory(name) as shared, memory(other):
        assert attach(daemon, shared)[0] == 200
        before = bytes(shared.mapping)
        wrong: list[Any] = [
            [8], [-1], [0, 0], [1 << 40], [1 << 70], [0.5], ["0"], [None], [True], [0, 8], [], [0, 1, 2], [[0]], {},
            list(range(9)),
        ]
        for frames in wrong:
            for verb in ("get", "set"):
                body = {"keys": keys_of(2, dice), "memory": name, "frames": frames, "timeout_s": 1}
                found[daemon.call("POST", f"{OPEN}/{verb}", body)[0]] += 1
        for where in (other, "absent", "../" + name, f"hicache.{name}", name + "\0", "", "a" * 129):
            body = {"keys": keys_of(1, dice), "memory": where, "frames": [0], "timeout_s": 1}
            found[daemon.call("POST", f"{OPEN}/get", body)[0]] += 1
        body = {"keys": keys_of(1, dice), "memory": name, "frames": [0], "mapping": "0" * 32, "timeout_s": 1}
        found[daemon.call("POST", f"{OPEN}/get", body)[0]] += 1
        assert bytes(shared.mapping) == before, "a rejected call has written to frames"
        assert daemon.call("DELETE", f"/v1/memory/{name}")[0] == 200
    assert set(found) <= {404, 422}, found
    return found


def _obstacles(folder: Path, dice: random.Random) -> Iterator[tuple[str, Path]]:
    """Yield names of shared memory at which other files are, each with its path."""
    victim = folder / "victim"
    victim.write_bytes(b"v" * (64 << 10))
    kinds = ("symlink", "dangling", "hardlink", "fifo", "directory", "socket", "empty", "short", "open", "sparse")
    for kind in kinds:
        name = f"{kind}{own(dice)}"
        path = path_of(name)
        if kind in {"symlink", "dangling"}:
            path.symlink_to(victim if kind == "symlink" else folder / "absent")
        elif kind == "hardlink":
            with contextlib.suppress(OSError):  # /dev/shm is another file system
                os.link(victim, path)
        elif kind == "fifo":
            os.mkfifo(path, 0o600)
        elif kind == "directory":
            path.mkdir(0o700)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
        else:
            path.touch(0o644 if kind == "open" else 0o600)
            layout = Layout(0, 1 << 20 if kind == "sparse" else 8, FRAME_BYTES, bytes(32))
            with path.open("r+b") as file:
                file.write(b"" if kind == "empty" else layout.pack())
                file.truncate(0 if kind == "empty" else 4096 if kind == "short" else layout.file_bytes)
        yield name, path
    assert victim.read_bytes() == b"v" * (64 << 10), "a file outside was written to"
    assert not (folder / "absent").exists()


def planted_files(daemon: Daemon, dice: random.Random) -> Answers:
    """Attach links, FIFOs, directories, and files of the wrong size or mode as the memory of an engine."""
    found: Answers = Counter()
    for name, path in _obstacles(daemon.folder, dice):
        try:
            state = os.stat(path) if path.exists() else os.lstat(daemon.log_file)
            for device, inode, pages in (
                (state.st_dev, state.st_ino, 8), (state.st_dev, state.st_ino, 1 << 20), (0, 0, 8), (None, None, 8),
            ):
                body: dict[str, Any] = {"frame_bytes": FRAME_BYTES, "pages": pages, "timeout_s": 0.2}
                body |= {"device": device, "inode": inode}
                if device is None:
                    body["shape"] = "00" * 32
                status, answer = daemon.call("PUT", f"/v1/memory/{name}", body)
                assert status in {409, 413, 422, 503} or (status == 200 and device is None), (name, status, answer)
                found[status] += 1
                if status == 200:
                    assert daemon.call("DELETE", f"/v1/memory/{name}")[0] == 200
        finally:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
    return found


def strange_memories(daemon: Daemon, dice: random.Random) -> Answers:
    """Attach memory with malicious names, and memory that does not match its description."""
    found: Answers = Counter()
    good = {"frame_bytes": FRAME_BYTES, "pages": 8, "device": 1, "inode": 1}
    for name in ("..", ".", "a/b", "..%2f..%2fetc%2fpasswd", "%00", "a%00b", "a" * 129, "%c3%a9", " ", "a%0d%0ab", "-"):
        found[daemon.call("PUT", f"/v1/memory/{name}", good)[0]] += 1
    with memory(f"d{own(dice)}") as shared:
        for other in (
            {"inode": shared.identity[1] + 1}, {"device": shared.identity[0] + 1}, {"pages": 7}, {"pages": 1 << 31},
            {"frame_bytes": 4096}, {"frame_bytes": 4097}, {"pages": 0}, {"pages": -1}, {"inode": -1},
            {"inode": 1 << 70}, {"device": None}, {"frame_bytes": 1 << 40}, {"shape": "zz"}, {"timeout_s": 0},
        ):
            found[attach(daemon, shared, **other)[0]] += 1
    assert set(found) <= {404, 405, 409, 413, 422, 503}, found
    return found


# Dead clients


def dead_clients(daemon: Daemon, dice: random.Random) -> Answers:
    """Disconnect at many points of a request: in its head, in its body, and before and during the answer."""
    with memory(f"e{own(dice)}") as shared:
        assert attach(daemon, shared)[0] == 200
        keys = keys_of(8, dice)
        transfer = {"keys": keys, "memory": shared.name, "frames": list(range(8)), "timeout_s": 5}
        whole_requests = [
            request("POST", f"{OPEN}/{verb}", json.dumps(body).encode())
            for verb, body in (
                ("exists", {"keys": keys, "timeout_s": 5}), ("get", transfer), ("set", {**transfer, "parent": None}),
                ("read", {"keys": keys, "timeout_s": 5}),
            )
        ]
        pages = dice.randbytes(8 * (32 + FRAME_BYTES))
        whole_requests.append(request("POST", f"{OPEN}/write?count=8&timeout_s=5", pages))
        for whole in whole_requests:
            points = [1, 20, whole.index(b"\r\n\r\n") + 3, whole.index(b"\r\n\r\n") + 4, len(whole) - 1, len(whole)]
            for point in [*points, *(dice.randrange(1, len(whole)) for _ in range(10))]:
                with daemon.connect() as sock:
                    sock.sendall(whole[:point])
                    if dice.randrange(2):
                        sock.shutdown(socket.SHUT_WR)
        assert daemon.call("DELETE", f"/v1/memory/{shared.name}")[0] == 200
    return Counter({0: 16 * len(whole_requests)})


ATTACKS: tuple[Attack, ...] = (
    absurd_lengths, heads, slow_clients, many_connections, floods, strange_json, foreign_frames, planted_files,
    strange_memories, dead_clients,
)
