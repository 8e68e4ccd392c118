"""A hostile S3 server, whose replies are drawn from a seed, and rounds of all verbs against it.

`run_round(seed)` opens a store on the server, for an engine and for an operator, runs verbs, and checks that each ends
in an outcome or a typed error, that a HIT has the right bytes, and that no text contains a key or token. It returns
counts of replies and results. The server sends a slow or endless reply until the client closes the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterator

from hicache.backends.base import StoredPage
from hicache.backends.s3 import S3Driver
from hicache.backends.s3.driver import object_name
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import HIT, NAMESPACE, full_frames, make_keys, store_of
from tests.backends.s3.bucket import CODEC, PAGE, options
from tests.backends.s3.stub import Answer, Request, StubS3, reply
from tests.hostile.verbs import Texts, Verbs, engine_verbs, operator_verbs, run_verb
from tests.waiting import wait_for, wait_until_made

# Each request contains the first two, and the server may send them back.
_SECRETS = {
    "HOSTILE_S3_ID": "HOSTILEACCESSKEYID", "HOSTILE_S3_TOKEN": "HostileSessionToken", "HOSTILE_S3_KEY": "Secret0000key",
}
_TIMEOUT_S = 0.15
_VERB_S = 0.3
_STEPS = 16
_KEYS = make_keys(3, "hostile")
_NAME = object_name("test/", NAMESPACE, _KEYS[0])

_OK = "HTTP/1.1 200 OK"
_STATUS_LINES = [
    "HTTP/1.1 \u00b200 OK", "HTTP/1.1 2\u00b20", "HTTP/1.1 \u0662\u0660\u0660 OK", "HTTP/1.1 -20 OK", "HTTP/1.1 2_0 OK",
    "HTTP/1.1 99999 OK", "HTTP/1.1 000 OK", "HTTP/1.1", "HTTP/2 200 OK", "HTTP/1.\u0661 200 OK", "ICY 200 OK",
    "HTTP/1.1 200\n", "HTTP/1.1  200 OK", "",
]
_STATUSES = [
    100, 101, 103, 199, 200, 201, 204, 206, 299, 300, 304, 400, 403, 404, 405, 409, 412, 416, 418, 500, 501, 503, 507,
    599, 600, 999,
]
_LENGTHS = [
    "-1", "+5", "0x10", "\u00b2", "\u0665", "1e3", "9" * 30, "9" * 5000, "5, 7", "1_0", " ", "5\r\ncontent-length: 7",
    str(10**14),
]
_SPLITS = ["\n", "\r", "\x00", "\x0b", "\x1b[2J", "\x7f", "\x85", "\u2028", "\n ", "\r\n "]
_CHUNKS = [
    "-1", "-ffffffff", "ffffffff", "0x5", "+5", "1_0", "\u00b2", "\u0665", " 5", "5 5", "", "5;" + "x" * 70_000,
    "9" * 5000,
]
_ENCODINGS = [
    "utf-16", "utf-7", "idna", "punycode", "hex", "zlib", "rot13", "unicode_escape", "cp037", "big5", "no-such", "",
    "\u00fc",
]
_DATES = [
    "99999-01-01T00:00:00Z", "0001-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "yesterday", "", "9" * 5000,
    "2026-13-45T99:99:99Z",
]
_SIZES = ["-1", "\u00b2", "\u0665", "1e9", "9" * 5000, "0x10", " 5 ", "", "NaN", str(10**14)]
_NAMES = ["../" + _NAME, _NAME + "\u0661", _NAME.upper(), "%00", "x" * 5000]
_CODES = ["SlowDown", "<b>x</b>", "", "\u00fc", "x" * 70_000, "<Code>a</Code>", "NoSuchBucket", "a\nb"]


def _listing(entries: str = "", token: str | None = None, *, truncated: bool = True) -> str:
    more = "" if token is None else f"<NextContinuationToken>{token}</NextContinuationToken>"
    return f"<ListBucketResult><IsTruncated>{str(truncated).lower()}</IsTruncated>{more}{entries}</ListBucketResult>"


def _entry(size: str = "1", date: str = "2026-01-02T03:04:05Z", key: str = _NAME) -> str:
    return f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{date}</LastModified></Contents>"


def _bomb() -> str:
    laughs = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 9))
    return f'<!DOCTYPE x [<!ENTITY a0 "{"ha" * 50}">{laughs}]><Error><Code>&a8;</Code></Error>'


_DOCUMENTS: list[Callable[[], str]] = [
    lambda: "<a>" * 200_000, lambda: "<a>" * 20_000 + "</a>" * 20_000, lambda: "<Error>" * 3000 + "</Error>" * 3000,
    _bomb, lambda: f"<!DOCTYPE x [<!ENTITY a '{'x' * 50_000}'>]><Error><Code>{'&a;' * 3000}</Code></Error>",
    lambda: "<!DOCTYPE x SYSTEM 'file:///etc/passwd'><Error><Code>&x;</Code></Error>",
    lambda: "<Error " + " ".join(f"a{n}=''" for n in range(100_000)) + "/>",
    lambda: "<x>" + "".join(f"<e{n}/>" for n in range(150_000)) + "</x>",
    lambda: "<ListBucketResult/>", lambda: "<html/>",
    lambda: "<DeleteResult>" + "<Error><Code>AccessDenied</Code></Error>" * 900 + "</DeleteResult>",
    lambda: "<Error><Code>SlowDown</Code></Error>", lambda: "", lambda: "\x00" * 1000, lambda: "<" * 100_000,
    lambda: f"<x>{'&' * 1000}</x>", lambda: "<Error><Error><Error>SlowDown</Error></Error></Error>",
]


class HostileS3:
    """A StubS3 whose replies are of the kind `kind` and drawn from `dice`. If `kind` is None, they are correct."""

    def __init__(self, stub: StubS3, dice: random.Random, trap_port: int) -> None:
        self.kind: str | None = None
        self.replies = 0
        self._stub = stub
        self._dice = dice
        self._trap = f"http://127.0.0.1:{trap_port}/"
        choice = dice.choice
        self._kinds: dict[str, Callable[[Request], Answer]] = {
            "garbage": lambda request: Answer(dice.randbytes(dice.randrange(3000)) + b"\r\n\r\n", "close"),
            "status line": lambda request: self._head(choice(_STATUS_LINES), "content-length: 0"),
            "status": lambda request: self._coded(choice(_STATUSES), choice(_CODES)),
            "header injection": self._injection,
            "length": lambda request: self._head(
                _OK, f"content-length: {choice(_LENGTHS)}", etag='"x"', body=b"x" * PAGE
            ),
            "chunks": self._chunks,
            "interim": lambda request: Answer(
                b"", more=self._endless(f"HTTP/1.1 {choice([100, 101, 103])} x\r\n\r\n")
            ),
            "endless head": lambda request: Answer(
                b"HTTP/1.1 200 OK\r\n", more=self._endless(choice(["x: y\r\n", "x"]))
            ),
            "many headers": lambda request: self._head(
                _OK, "\r\n".join(f"h{n}: v" for n in range(choice([90, 150, 3000])))
            ),
            "endless body": lambda request: Answer(b"HTTP/1.1 500 x\r\n\r\n", more=self._endless("x" * 4096)),
            "encoding": self._encoded,
            "document": lambda request: reply(choice([200, 400, 503]), choice(_DOCUMENTS)().encode(), etag='"x"'),
            "listing": self._listed,
            "wrong length": self._cut,
            "slow": self._slow,
            "echo": self._echo,
            "redirection": lambda request: reply(
                choice([301, 302, 303, 307, 308, 400, 403]), location=self._trap,
                x_amz_bucket_region=choice(["eu-west-1", "a\nb", "x" * 5000]),
            ),
            "mutation": self._mutated,
        }
        stub.fault = self._fault

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    def _fault(self, request: Request) -> Answer | None:
        if self.kind is None:
            return None
        self.replies += 1
        return self._kinds[self.kind](request)

    def _endless(self, piece: str) -> Iterator[bytes]:
        data = piece.encode() * (1 + 8192 // len(piece))
        while not self._stub.released.is_set():
            yield data

    def _head(self, *lines: str, body: bytes = b"", **headers: str) -> Answer:
        fields = [*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        encoding = self._dice.choice(["utf-8", "latin-1"])
        return Answer("\r\n".join(fields).encode(encoding, "replace") + body, "close")

    def _coded(self, status: int, code: str) -> Answer:
        root = self._dice.choice(["Error", "ErrorResponse", "x:Error"])
        return reply(status, f"<{root}><Code>{code}</Code></{root}>".encode())

    def _correct(self, request: Request) -> bytes:
        return self._stub._answer(request).data

    def _injection(self, request: Request) -> Answer:
        split = self._dice.choice(_SPLITS)
        etag = self._dice.choice([f'"a{split}x-injected: 1"', f"a{split}b", "a b", '"', 'W/"', f'"{"x" * 20_000}"'])
        return self._head(_OK, f"content-length: {PAGE}", etag=etag, body=b"x" * PAGE)

    def _chunks(self, request: Request) -> Answer:
        head = b"HTTP/1.1 %d x\r\ntransfer-encoding: chunked\r\n\r\n" % self._dice.choice([200, 404, 503])
        long = "1;" + "y" * 3000 + "\r\nx\r\n"
        more = self._dice.choice(["1\r\nx\r\n", long, "0\r\nx: y\r\n", "x: y\r\n", "5\r\nhelloXX"])
        bad = self._dice.choice(_CHUNKS).encode()
        return self._dice.choice([
            Answer(head + bad + b"\r\nhello\r\n0\r\n\r\n", "close"), Answer(head, more=self._endless(more)),
            Answer(head + b"0\r\n", more=self._endless("x: y\r\n")), Answer(head + bad, "close"),
            Answer(head + b"-1\r\n", more=self._endless("x")), Answer(head, more=self._endless("1")),
        ])

    def _encoded(self, request: Request) -> Answer:
        encoding = self._dice.choice(_ENCODINGS)
        text = f'<?xml version="1.0" encoding="{encoding}"?>{_listing(_entry(), truncated=False)}'
        with contextlib.suppress(LookupError, ValueError, AssertionError):
            return reply(self._dice.choice([200, 400]), text.encode(self._dice.choice([encoding, "utf-8", "utf-16"])))
        return reply(200, text.encode())

    def _listed(self, request: Request) -> Answer:
        dice = self._dice
        token = request.query.get("continuation-token", ["0"])[0]
        return reply(200, dice.choice([
            _listing(_entry(), "same"), _listing("", {"a": "b", "b": "c"}.get(token, "a")), _listing(),
            _listing("", "x" * 100_000), _listing("", ""), _listing("", "a\u2028&#10;&#13;b\u00e9"),
            _listing(_entry(size=dice.choice(_SIZES)), truncated=False),
            _listing(_entry(date=dice.choice(_DATES)), truncated=False),
            _listing(_entry(key=dice.choice(_NAMES)), truncated=False), _listing(_entry() * 3000, truncated=False),
            _listing("<Contents><Contents/></Contents>" * 50, truncated=False),
            "<ListBucketResult>" + _entry() + "</ListBucketResult>",
        ]).encode())

    def _cut(self, request: Request) -> Answer:
        data = self._correct(request)
        end = self._dice.choice([self._dice.randrange(len(data) + 1), len(data)])
        after = b"x" * self._dice.choice([0, 1, 5000])
        return Answer(data[:end] + after, self._dice.choice(["keep", "close", "reset", "hang"]))

    def _slow(self, request: Request) -> Answer:
        data = self._correct(request)
        start = self._dice.choice([0, 5, 40, len(data) // 2])

        def drip() -> Iterator[bytes]:
            for number in itertools.chain(data[start:], itertools.repeat(120)):
                if self._stub.released.wait(0.02):
                    return
                yield bytes([number])

        return Answer(data[:start], more=drip())

    def _echo(self, request: Request) -> Answer:
        """Return a reply with a secret of the request: the identity, the token or the signature."""
        told = self._dice.choice([*_SECRETS.values(), request.headers.get("authorization", "")])
        status = self._dice.choice([400, 403, 503])
        body = f"<Error><Code>{told}</Code><Message>{told}</Message><AWSAccessKeyId>{told}</AWSAccessKeyId></Error>"
        length = f"content-length: {len(body)}"
        return self._head(f"HTTP/1.1 {status} {told}", length, f"etag: {told}", body=body.encode())

    def _mutated(self, request: Request) -> Answer:
        data = bytearray(self._correct(request))
        for _ in range(self._dice.randrange(1, 20)):
            at = self._dice.randrange(min(len(data), 400) + 1)
            data[at : at + self._dice.randrange(3)] = self._dice.randbytes(self._dice.randrange(3))
        return Answer(bytes(data), "close")


class _Stores:
    """The stores of an engine and of an operator, and their verbs."""

    def __init__(self, url: str) -> None:
        chosen = options(
            url, connections=3, timeout=_TIMEOUT_S, connect_timeout=1.0,
            access_key_env="HOSTILE_S3_ID", secret_key_env="HOSTILE_S3_KEY", session_token_env="HOSTILE_S3_TOKEN",
        )
        parents = [None, *_KEYS[:-1]]
        self.pages = {
            object_name("test/", NAMESPACE, key): bytes(CODEC.seal(key, frame, parent=parent))
            for key, frame, parent in zip(_KEYS, full_frames(CODEC, _KEYS), parents, strict=True)
        }
        # On a busy machine even a correct server may not answer in time.
        self.backend = wait_until_made(lambda: store_of(S3Driver, CODEC, chosen), BackendUnavailable)
        self._raw = wait_until_made(lambda: StoredPages(S3Driver(None, chosen), "s3"), BackendUnavailable)
        self.verbs: Verbs = {
            **engine_verbs(self.backend, _KEYS, _VERB_S),
            **operator_verbs(self._raw, StoredPage(NAMESPACE, _KEYS[0], PAGE, None)),
            "open": lambda: store_of(S3Driver, CODEC, chosen).close(),
            "open raw": lambda: StoredPages(S3Driver(None, chosen), "s3").close(),
        }

    def close(self) -> None:
        self.backend.close()
        self._raw.close()


@contextlib.contextmanager
def _secrets() -> Iterator[Texts]:
    """Set the credentials in the environment. Yields the collector of logged lines."""
    lines = Texts()
    os.environ.update(_SECRETS)
    logging.getLogger().addHandler(lines)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(lines)
        for name in _SECRETS:
            del os.environ[name]


def run_round(seed: int) -> Counter[str]:
    """Run one round. Return the counts of replies by kind and of verbs by result.

    Blocks for one to three seconds. Raises AssertionError, or the error of a verb. Leaves no thread or descriptor.
    """
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    with _secrets() as texts, socket.create_server(("127.0.0.1", 0)) as trap, StubS3("pages") as stub:
        server = HostileS3(stub, dice, trap.getsockname()[1])
        stores = _Stores(stub.url)
        for _ in range(_STEPS):
            stub.objects = dict(stores.pages)
            server.kind = dice.choice(server.kinds)
            before = server.replies
            # These verbs have no deadline and would wait for a minute.
            lasting = {"usage", "list", "read", "write", "remove"} if server.kind in ("slow", "interim") else set()
            verb = dice.choice([name for name in stores.verbs if name not in lasting])
            try:
                run_verb(verb, stores.verbs[verb], counts, texts)
            except BaseException as error:
                error.add_note(f"by {verb}, against {server.kind}")
                raise
            counts[f"reply: {server.kind}"] += server.replies - before
        server.kind, stub.objects = None, dict(stores.pages)
        wait_for(lambda: stores.verbs["get"]() == [HIT] * len(_KEYS))
        errors = dict(stores.backend.statistics().errors)
        stores.close()
        assert not select.select([trap], [], [], 0)[0], "a redirection was followed"
        assert not any("x-injected" in request.headers for request in stub.requests)
    assert "internal" not in errors
    assert sum(counts[f"reply: {kind}"] for kind in server.kinds) > 10, "the server was hardly hostile"
    shown = [text for text in [*texts.texts, *errors] for secret in _SECRETS.values() if secret in text]
    assert not shown, f"a secret is in {shown[:3]}"
    return counts
