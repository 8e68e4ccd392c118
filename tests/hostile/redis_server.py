"""A Redis server whose hostile replies are drawn from a seed, and rounds of all verbs of the Redis backend against it.

`run_round(seed)` checks that each verb ends with outcomes or typed errors, that no text contains the password, and that
a redirected client does not connect to another address. Tests call it repeatedly and measure the memory and the
descriptors of the process.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import logging
import os
import random
import socket
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hicache.backends.base import StoredPage
from hicache.backends.redis import RedisDriver
from hicache.backends.stored import StoredPages
from hicache.config.redis_storage import RedisStorageOptions
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, driver_of, make_keys, store_of
from hicache_lab.devservers.ports import LOOPBACK
from tests.hostile.verbs import Texts, engine_verbs, operator_verbs, run_verb
from tests.listening import Listener

# Another address of the loopback network: a client that connects to it has followed the hostile server.
ELSEWHERE = "127.0.0.2"
# A password that is a valid host name, so that a server can name a node like it.
PASSWORD, USER = "hush.Pa55_word-x", "user-of-hush"
PASSWORD_ENV = "PASSWORD_OF_HOSTILE_ROUNDS"
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
# Short, so that silent replies cost little time; the pauses of a drip are shorter than both.
TIMEOUT_S, DEADLINE_S = 0.1, 0.25
_PAGES = 6
_CHUNK = b"*1\r\n:1\r\n$0\r\n\r\n*0\r\n" * 2048
_ENDLESS_BYTES = 48 << 20


def encodings(secret: str) -> set[str]:
    """Return the forms of a secret in texts: plain, escaped, quoted, in base64 and in hexadecimal."""
    data = secret.encode()
    forms = {secret, repr(secret)[1:-1], urllib.parse.quote(secret, safe=""), data.hex(),
             base64.b64encode(data).decode(), base64.b64encode(data).decode().rstrip("=")}
    return forms | {form.upper() for form in forms} | {form.lower() for form in forms}


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def array(*values: bytes) -> bytes:
    return b"*%d\r\n" % len(values) + b"".join(values)


class Trap:
    """A TCP listener at another address and a Unix socket. No client may connect to them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trap"
        self._listeners = [socket.create_server((ELSEWHERE, 0)), socket.socket(socket.AF_UNIX)]
        self._listeners[1].bind(str(self.path))
        self._listeners[1].listen()
        self.port: int = self._listeners[0].getsockname()[1]

    def close(self) -> int:
        """Close both. Return the number of connections."""
        caught = 0
        for listener in self._listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    listener.accept()[0].close()
                    caught += 1
            listener.close()
        return caught


class HostileServer(Listener):
    """A server that answers like an honest one of `mode`; if `hostile` is set, a share of its replies is hostile.

    `lie` returns the hostile reply to a request, None for an honest one; without `lie`, replies of all kinds are drawn.
    Each connection has its own thread and its own random numbers.
    """

    def __init__(
        self, seed: int, mode: str = "single", *, trap_port: int = 1, trap_path: str = "trap",
        lie: Callable[[list[bytes]], bytes | None] | None = None, share: float = 1.0,
    ) -> None:
        self._seed = seed
        self._mode = mode
        self._trap_port = trap_port
        self._trap_path = trap_path
        self._lie = lie
        self._share = share
        self.hostile = False
        self.requests: Counter[bytes] = Counter()  # by verb
        self.sent: Counter[str] = Counter()  # hostile replies by kind
        super().__init__(self._answer)

    def _answer(self, sock: socket.socket, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        with sock.makefile("rb") as lines, contextlib.suppress(ValueError):
            for request in _requests(lines):
                self.requests[request[0]] += 1
                if self.hostile and dice.random() < self._share:
                    self._attack(sock, dice, request)
                else:
                    sock.sendall(self._honest(request))

    def _honest(self, request: list[bytes]) -> bytes:
        verb = b" ".join(request[:2]).upper() if request[0].upper() in (b"CLUSTER", b"SENTINEL") else request[0].upper()
        mode = {"cluster": b"cluster"}.get(self._mode, b"standalone")
        node = array(bulk(LOOPBACK.encode()), b":%d\r\n" % self.port)
        facts = array(*map(bulk, (b"ip", LOOPBACK.encode(), b"port", b"%d" % self.port, b"flags", b"master")))
        return {
            b"HELLO": array(*map(bulk, (b"version", b"7.2.0", b"mode", mode))),
            b"CLUSTER SLOTS": array(array(b":0\r\n", b":16383\r\n", node)),
            b"SENTINEL MASTER": facts,
            b"SENTINEL REPLICAS": array(facts),
            b"EXISTS": b":0\r\n", b"TOUCH": b":0\r\n", b"UNLINK": b":1\r\n", b"EVAL": b":1\r\n", b"STRLEN": b":5\r\n",
            b"GET": b"$-1\r\n", b"DBSIZE": b":7\r\n", b"OBJECT": b":3\r\n", b"GETRANGE": bulk(b"bytes"),
            b"INFO": bulk(b"# Memory\r\nmaxmemory:1000\r\n"),
            b"SCAN": array(bulk(b"0"), array(bulk(_name(bytes(32))))),
        }.get(verb, b"+OK\r\n")

    def _attack(self, sock: socket.socket, dice: random.Random, request: list[bytes]) -> None:
        if self._lie is not None:
            sock.sendall(self._lie(request) or self._honest(request))
            return
        kind = dice.choice(_KINDS)
        self.sent[kind] += 1
        if request[0] == b"SCAN" and dice.random() < 0.3:
            kind = "scan"
        if kind == "end":
            sock.shutdown(socket.SHUT_RDWR)
        elif kind == "endless":
            for _ in range(_ENDLESS_BYTES // len(_CHUNK)):
                sock.sendall(_CHUNK)
        elif kind == "silence":
            time.sleep(2 * TIMEOUT_S)
        elif kind == "drip":
            for byte in hostile_reply(dice, "wrong", self)[:8]:
                sock.sendall(bytes([byte]))
                time.sleep(TIMEOUT_S / 4)
        elif kind == "opening":  # the first line of a longer reply; the rest comes later
            sock.sendall(dice.choice([b"$7\r\n", b"*1\r\n"]))
            time.sleep(TIMEOUT_S / 8)
            sock.sendall(b"$-1\r\nxx\r\n")
        elif kind == "leftover":  # as long as the bytes read ahead of a page, then a surplus reply
            sock.sendall(b"-ERR " + b"x" * 25 + b"\r\n$-1\r\n")
        else:
            sock.sendall(hostile_reply(dice, kind, self))

    def target(self, dice: random.Random) -> bytes:
        """Return the target of a redirection: a trap, or an invalid address."""
        return dice.choice([
            *[b"%b:%d" % (ELSEWHERE.encode(), self._trap_port)] * 6, self._trap_path.encode() + b":0",
            b"a..b:7000", b"::a..b:7000", b"x" * 64 + b".example:7000", b"[::1]:0",
            "h\u00f6st:7000".encode(), b"host:\xb2", b"host:99999", b":%d" % self._trap_port, b"", b"/:1", b"\x00:5",
            PASSWORD.encode() + b":7", b"host:" + b"9" * 5000,
        ])


_KINDS = ("wrong", "wrong", "wrong", "redirection", "redirection", "echo", "echo", "nested", "wide", "length",
          "garbage", "cut", "facts", "line", "page", "end", "endless", "silence", "drip", "opening",
          "leftover")


def hostile_reply(dice: random.Random, kind: str, server: HostileServer) -> bytes:
    """Return the bytes of one hostile reply of a kind."""
    if kind == "redirection":
        return b"-%b %d %b\r\n" % (dice.choice([b"MOVED", b"ASK"]), dice.randrange(20_000), server.target(dice))
    if kind == "echo":
        secret = dice.choice(sorted(encodings(PASSWORD) | {USER})).encode()
        return dice.choice([
            b"-ERR unknown command 'AUTH', with args beginning with: '%b'\r\n", b"-ERR bad request: AUTH %b\r\n",
            b"-WRONGPASS %b is not it\r\n", b"-%b\r\n", b"-NOPERM '%b' command\r\n", b"+%b\r\n", b"-MOVED 1 %b:7\r\n",
        ]) % secret
    if kind == "nested":
        return b"*1\r\n" * dice.choice([2, 9, 5000])
    if kind == "wide":
        return b"*%d\r\n" % dice.choice([1000, 262_143, 262_145, 10**9]) + b"*0\r\n" * 300_000
    if kind == "length":
        number = dice.choice([
            b"-5", b"9" * 19, b"9" * 30, b"2147483647", b"8388608", b"-", b"", b"\xb2", b"1_0", b" 5",
        ])
        return dice.choice([b"$", b"*", b":"]) + number + b"\r\n" + bytes(dice.randrange(100))
    if kind == "scan":  # a scan without an end; each reply is within the limit of the client
        return array(bulk(b"5"), array(bulk(dice.randbytes(8) + bytes(4 << 20))))
    if kind == "facts":
        return _false_facts(dice, server)
    if kind == "line":
        return dice.choice([b"-", b"+", b":"]) + b"5" * dice.choice([600, 5000, 40_000]) + b"\r\n"
    if kind == "page":
        return bulk(bytes(dice.choice([0, 1, CODEC.frame_bytes, CODEC.frame_bytes + 1, 5 << 20])))
    if kind == "cut":
        return bulk(b"abcdefgh")[: dice.randrange(1, 10)]
    if kind == "garbage":
        return dice.randbytes(dice.randrange(1, 400))
    return dice.choice([
        b"+OK\r\n", b":5\r\n", b":-1\r\n", b":%d\r\n" % 10**19, b"$-1\r\n", b"*-1\r\n", b"*0\r\n", bulk(b""),
        bulk(b"7"), array(bulk(b"1"), array()), array(bulk(b"x"), array()), array(b":1\r\n", b"$-1\r\n"), b"\r\n",
        b"-\r\n", b"-ERR\r\n", b"-OOM no\r\n", b"-WRONGTYPE no\r\n", b"-LOADING no\r\n", b"-CLUSTERDOWN no\r\n",
        b"-READONLY no\r\n", array(bulk(b"0"), array(bulk(_name(dice.randbytes(32))), b":5\r\n", b"*0\r\n")),
    ])


def _false_facts(dice: random.Random, server: HostileServer) -> bytes:
    """Return a false answer to HELLO, INFO, CLUSTER SLOTS or SENTINEL."""
    host, _, port = server.target(dice).rpartition(b":")
    number = b":%b\r\n" % (port if port.isdigit() else b"70000")
    where = (b"ip", host, b"port", port, b"flags", dice.choice([b"master", b"slave", b"s_down", b"\xff"]))
    return dice.choice([
        array(*map(bulk, (b"version", dice.choice([b"\xc2\xb2.\xc2\xb3", b"9" * 5000, PASSWORD.encode()]), b"mode"))),
        bulk(b"maxmemory:" + dice.choice([b"9" * 5000, b"-1", b"\xb2", b"5\r\nmaxmemory:7"]) + b"\r\n"),
        array(array(b":0\r\n", b":16383\r\n", array(bulk(host), number))),
        array(array(b":0\r\n", b":16384\r\n", array(bulk(host), number))),
        array(*[array(b":1\r\n", b":1\r\n", array(bulk(b"127.0.0.3"), b":%d\r\n" % (1000 + i))) for i in range(1200)]),
        array(*map(bulk, where)), array(array(*map(bulk, where))), array(*map(bulk, where[:3])),
    ])


def _name(key: bytes) -> bytes:
    return b"hicache:%b:%b" % (NAMESPACE.hex().encode(), key.hex().encode())


def _requests(lines: io.BufferedReader) -> Iterator[list[bytes]]:
    while (head := lines.readline()).startswith(b"*"):
        request = []
        for _ in range(int(head[1:])):
            size = int(lines.readline()[1:])
            request.append(lines.read(size + 2)[:-2])
        yield request


def run_round(seed: int) -> Counter[str]:
    """Run every verb of an engine and of an operator on one server. Return the results, counted by verb.

    Raises AssertionError for a result that is not an outcome or a typed error, for a text with the secret, and for a
    connection to another address. The error names the seed.
    """
    dice = random.Random(seed)
    texts, counts = Texts(), Counter[str]()
    log = logging.getLogger("hicache")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        trap = Trap(Path(folder))
        mode = dice.choice(["single", "cluster", "sentinel"])
        share = dice.choice([0.1, 0.3, 0.8])
        server = HostileServer(seed, mode, trap_port=trap.port, trap_path=str(trap.path), share=share)
        cleanup.callback(server.close)
        log.addHandler(texts)
        cleanup.callback(log.removeHandler, texts)
        try:
            open_backend = functools.partial(store_of, RedisDriver, CODEC)
            for open_store, use in ((open_backend, _use_backend), (_open_stored, _use_raw)):
                server.hostile = dice.random() < 0.3  # while the store is opened; later always
                _round(open_store, use, _options(mode, server.port), server, counts, texts)
        except BaseException as error:
            error.add_note(f"hostile Redis server, seed {seed}, {mode}, sent {dict(server.sent)}")
            raise
        caught = trap.close()
    assert not caught, f"seed {seed}: {caught} connections followed a redirection"
    found = [text for text in texts.texts for secret in (*encodings(PASSWORD), USER) if secret in text]
    assert not found, f"seed {seed}: a secret is in {found[:3]}"
    return counts


def _options(mode: str, port: int) -> dict[str, Any]:
    os.environ[PASSWORD_ENV] = PASSWORD
    where: dict[str, dict[str, Any]] = {
        "single": {"url": f"redis://{LOOPBACK}:{port}"},
        "cluster": {"cluster": [f"{LOOPBACK}:{port}"], "allowed_nodes": [LOOPBACK, "127.0.0.3"]},
        "sentinel": {
            "sentinels": [f"{LOOPBACK}:{port}"], "service": "cache", "allowed_nodes": [LOOPBACK],
            "sentinel_password_env": PASSWORD_ENV,
        },
    }
    return {**where[mode], "password_env": PASSWORD_ENV, "username": USER, "timeout": TIMEOUT_S}


def _round(
    open_store: Callable[..., Any], use: Callable[..., None], options: dict[str, Any], server: HostileServer,
    counts: Counter[str], texts: Texts,
) -> None:
    try:
        store = open_store(RedisStorageOptions(**options))
    except (BackendUnavailable, ConfigError) as error:
        texts.note(error)
        counts[f"open {type(error).__name__}"] += 1
        return
    counts["open"] += 1
    server.hostile = True
    try:
        use(store, counts, texts)
    finally:
        store.close()
        counts["close"] += 1


def _use_backend(backend: Any, counts: Counter[str], texts: Texts) -> None:
    verbs = engine_verbs(backend, make_keys(_PAGES), DEADLINE_S)
    for name, verb in [*verbs.items(), *verbs.items()]:
        run_verb(name, verb, counts, texts)
    statistics = backend.statistics()
    texts.texts.append(repr((statistics, driver_of(backend, RedisDriver).options)).replace(f"username='{USER}'", ""))
    counts.update({f"error {name}": times for name, times in statistics.errors.items()})


def _open_stored(options: RedisStorageOptions) -> StoredPages:
    return StoredPages(RedisDriver(None, options), "redis")


def _use_raw(raw: Any, counts: Counter[str], texts: Texts) -> None:
    for name, verb in operator_verbs(raw, StoredPage(NAMESPACE, make_keys(1)[0], 5, None)).items():
        run_verb(f"raw {name}", verb, counts, texts)
