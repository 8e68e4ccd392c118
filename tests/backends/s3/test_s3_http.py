"""Below the S3 client: parsing of replies, renewed values, and the documentation page."""

from __future__ import annotations

import math
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.errors import ErrorKind, StoreError, kind_of_exception
from hicache.backends.http import Connection, Head, parse_head
from hicache.backends.rotated import Refreshed
from hicache.backends.s3.replies import failed_reply
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import soon
from tests.backends.s3.bucket import Bucket
from tests.waiting import wait_for


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection and the server's end of it."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, 0.2)
    yield connection, theirs
    connection.close()
    theirs.close()


def received(pair: tuple[Connection, socket.socket], data: bytes, bytes_max: int = 1000) -> bytes:
    """Return the body of the reply `data`, after which the server closes the connection."""
    connection, server = pair
    server.sendall(data)
    server.shutdown(socket.SHUT_WR)
    return connection.read_body(connection.read_head(soon()), bytes_max, soon())


@pytest.mark.parametrize(
    ("body", "expected"),
    [("content-length: 5\r\n\r\nhello", b"hello"), ("Content-Length:   0\r\n\r\n", b""),
     ("transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello"),
     ("Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\ntrailer: x\r\n\r\n", b"hello"),
     ("\r\nhello", b"hello")],
)
def test_a_small_body_may_use_any_framing_of_http(
    pair: tuple[Connection, socket.socket], body: str, expected: bytes
) -> None:
    assert received(pair, f"HTTP/1.1 200 OK\r\n{body}".encode()) == expected


def test_interim_replies_are_skipped(pair: tuple[Connection, socket.socket]) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 x\r\na: b\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert received(pair, data) == b"ok"


@pytest.mark.parametrize(
    "body",
    ["content-length: 1001\r\n\r\n", "content-length: 5\r\n\r\nhell", "transfer-encoding: chunked\r\n\r\n5\r\nhe",
     "transfer-encoding: chunked\r\n\r\nxyz\r\n", "transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
     "transfer-encoding: chunked\r\n\r\nfffffffff\r\n", "transfer-encoding: chunked\r\n\r\n3e9\r\n",
     "\r\n" + "x" * 2000, "a b\r\n\r\n"],
)
def test_a_small_body_that_is_cut_or_too_long_is_refused(pair: tuple[Connection, socket.socket], body: str) -> None:
    with pytest.raises(StoreError):
        received(pair, f"HTTP/1.1 200 OK\r\n{body}".encode())


def test_endless_interim_replies_are_refused(pair: tuple[Connection, socket.socket]) -> None:
    with pytest.raises(StoreError, match="interim"):
        received(pair, b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_head_or_refused(noise: bytes, starts_well: bool) -> None:
    try:
        head = parse_head((b"HTTP/1.1 200 OK\r\n" if starts_well else b"") + noise + b"\r\n\r\n")
    except StoreError as error:
        assert error.kind is ErrorKind.PROTOCOL
    else:
        assert 0 <= head.status <= 999


@pytest.mark.parametrize("line", [
    "HTTP/1.1 \u0662\u0660\u0660 OK", "HTTP/1.1 2\u00b20 OK", "HTTP/1.1 20 OK", "HTTP/1.1 2000 OK", "HTTP/1.1 -20 OK",
])
def test_a_status_with_non_ascii_digits_is_refused(line: str) -> None:
    for encoding in ("utf-8", "latin-1"):
        with pytest.raises(StoreError, match="protocol"):
            parse_head(line.encode(encoding, "replace") + b"\r\ncontent-length: 0\r\n\r\n")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_value_is_loaded_again_when_it_is_old_or_expired(clock: ManualClock) -> None:
    value = Refreshed("test", iter(range(100)).__next__, 3600.0, clock=clock)
    assert value.get(deadline=math.inf) == 0
    clock.advance(3599.0)
    assert [value.get(deadline=math.inf) for _ in range(5)] == [0] * 5
    clock.advance(2.0)
    wait_for(lambda: value.get(deadline=math.inf) == 1)
    value.expire()
    wait_for(lambda: value.get(deadline=math.inf) == 2)


def test_a_value_that_is_too_old_is_not_used_while_a_new_one_is_loaded(clock: ManualClock) -> None:
    value = Refreshed("test", iter(range(100)).__next__, 60.0, 600.0, clock=clock)
    assert value.get(deadline=math.inf) == 0
    clock.advance(601.0)
    assert value.get(deadline=math.inf) == 1


def test_an_old_value_is_used_while_a_new_one_is_loaded(clock: ManualClock) -> None:
    gate, loads = threading.Event(), iter(range(100))

    def load() -> str:
        number = next(loads)
        if number:
            gate.wait(30)
        return f"value {number}"

    value = Refreshed("test", load, 3600.0, clock=clock)
    assert value.get(deadline=math.inf) == "value 0"
    clock.advance(3601.0)
    assert value.get(deadline=clock()) == "value 0"
    gate.set()
    wait_for(lambda: value.get(deadline=math.inf) == "value 1")


def test_the_first_value_is_waited_for_until_the_deadline(clock: ManualClock) -> None:
    gate = threading.Event()
    value = Refreshed("test", lambda: gate.wait(30), 3600.0, clock=clock)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(value.get, deadline=clock() + 1.0)
        wait_for(waiting.done, lambda: clock.advance(1.0))
    with pytest.raises(StoreError) as caught:
        waiting.result()
    assert caught.value.kind is ErrorKind.TIMEOUT
    gate.set()
    assert value.get(deadline=math.inf) is True


@pytest.mark.parametrize(
    ("failure", "kind"), [(StoreError(ErrorKind.DNS, "no address"), "dns"), (RuntimeError("a bug"), "internal")]
)
def test_a_failure_or_bug_is_raised_and_the_next_request_tries_again(failure: Exception, kind: str) -> None:
    answers = iter([failure, failure, None])

    def load() -> str:
        if (answer := next(answers)) is not None:
            raise answer
        return "works"

    value = Refreshed("test", load, 3600.0)
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            value.get(deadline=soon())
        assert caught.value.kind == kind
    assert value.get(deadline=soon()) == "works"


@pytest.mark.parametrize(("asked", "seconds"), [("5", 5.0), ("9" * 30, 60.0), ("-5", 0.0), ("1.5", 0.0), ("", 0.0)])
def test_a_pause_requested_by_the_server_is_limited(asked: str, seconds: float) -> None:
    assert Head(503, {"retry-after": asked}).retry_after_s == seconds


@pytest.mark.parametrize(("status", "code"), [(413, ""), (400, "EntityTooLarge")])
def test_a_limit_of_the_size_has_a_kind_of_its_own(status: int, code: str) -> None:
    assert failed_reply(status, code).kind == ErrorKind.TOO_LARGE


@pytest.mark.parametrize("words", [
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid (_ssl.c:1006)",
    "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired (_ssl.c:1006)",
])
def test_a_certificate_outside_its_dates_has_a_kind_of_its_own(words: str) -> None:
    assert kind_of_exception(ssl.SSLError(1, words)) is ErrorKind.CERTIFICATE_EXPIRED
    assert kind_of_exception(ssl.SSLError(1, "[SSL] certificate verify failed: self-signed")) is ErrorKind.TLS


def test_an_unknown_error_code_is_not_shown() -> None:
    assert "<script>" not in str(failed_reply(500, "<script>"))
    assert "InternalError" in str(failed_reply(500, "InternalError"))


def test_a_real_server_accepts_the_documented_lifecycle_rule(
    bucket: Bucket, repository: Path, tmp_path: Path
) -> None:
    page = (repository / "docs/backends/s3.md").read_text()
    (rule,) = re.findall(r"^```json\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "lifecycle.json").write_text(rule)
    environment = {
        **os.environ, "AWS_ENDPOINT_URL": bucket.url, "AWS_ACCESS_KEY_ID": os.environ["S3_ACCESS_KEY"],
        "AWS_SECRET_ACCESS_KEY": os.environ["S3_SECRET_KEY"], "AWS_DEFAULT_REGION": "us-east-1",
    }
    program = program.replace('"pages"', repr(bucket.name))
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=False, capture_output=True,
        text=True, timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "hicache-pages" in ran.stdout


def test_the_documentation_names_every_error_kind_of_the_package(repository: Path) -> None:
    backends = repository / "hicache/backends"
    files = [*(backends / "s3").glob("*.py"), backends / "http.py", backends / "rotated.py"]
    source = "".join(path.read_text() for path in files)
    used = {ErrorKind[name].value for name in re.findall(r"\bErrorKind\.([A-Z_]+)", source)} - {"internal"}
    page = (repository / "docs/backends/s3.md").read_text()
    table = page.partition("| kind |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert named == used | {"deadline"}
