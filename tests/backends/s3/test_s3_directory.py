"""Directory buckets (S3 Express), on a stub that keeps their documented rules: keys of a session, and listings of whole
folders. `test_s3_signer` compares the signatures with botocore's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from hicache.backends.errors import StoreError
from hicache.backends.s3 import S3Driver
from hicache.backends.s3.access import open_access
from hicache.backends.s3.client import S3Client
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import NAMESPACE, make_keys, soon, store_of
from tests.backends.s3.bucket import CODEC, PAGE, errors, moves_pages, opened, options
from tests.backends.s3.stub import Answer, Request, StubS3, error, reply
from tests.backends.s3.test_s3_signer import SESSION
from tests.waiting import wait_for

KEYS = make_keys(3)
# Invalid replies to CreateSession.
INVALID = {
    "no keys": reply(200, b"<CreateSessionResult/>"),
    "another document": reply(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
    "a token with a line end": reply(200, SESSION.replace(b"a-session", b"a\nx: y")),
    "too long": reply(200, b"<CreateSessionResult>" + b" " * (1 << 20) + b"</CreateSessionResult>"),
}


@pytest.fixture
def place(stub: StubS3) -> Iterator[StubS3]:
    with StubS3("pages--use1-az4--x-s3") as server:
        server.fault = rules(lambda: reply(200, SESSION))
        yield server


def rules(session: Callable[[], Answer]) -> Callable[[Request], Answer | None]:
    """Return the rules of a directory bucket that answers requests for a session with `session()`."""

    def rule(request: Request) -> Answer | None:
        if "session" in request.query:
            return session()
        if request.headers.get("x-amz-s3session-token") != "a-session" or "x-amz-security-token" in request.headers:
            return error(403, "AccessDenied")
        if request.is_list and not request.query.get("prefix", ["/"])[0].endswith("/"):
            return error(400, "InvalidArgument")
        if request.method == "POST" and "x-amz-checksum-crc32" not in request.headers:
            return error(400, "InvalidRequest")
        return None

    return rule


def test_every_verb_works_in_a_directory_bucket(place: StubS3) -> None:
    with opened(options(place.url, bucket=place.bucket)) as store:
        moves_pages(store, KEYS)
        assert store.backend.usage().pages == store.backend.batch_exists(KEYS, deadline=soon()) == 3
        assert store.backend.delete(KEYS[:1], deadline=soon()) == 1
        assert store.backend.clear(deadline=soon()) == 2
        assert errors(store) == {} and place.objects == {}
    assert sum("session" in request.query for request in place.received) == 1


def test_an_operator_lists_namespaces_by_their_first_digits(place: StubS3) -> None:
    other = bytes([NAMESPACE[0] ^ 1]) + NAMESPACE[1:]
    for namespace in (NAMESPACE, other):
        place.objects[f"test/{namespace.hex()}/{KEYS[0].hex()[:2]}/{KEYS[0].hex()}"] = b"x" * PAGE
    raw = StoredPages(S3Driver(None, options(place.url, bucket=place.bucket)), "s3")
    assert {page.namespace for page in raw.pages()} == {NAMESPACE, other}
    for digits in (2, 64):
        assert [page.namespace for page in raw.pages(NAMESPACE.hex()[:digits])] == [NAMESPACE]
    raw.close()


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_session_is_reported_at_start(place: StubS3, what: str) -> None:
    place.fault = rules(lambda: INVALID[what])
    with pytest.raises(BackendUnavailable, match="protocol"):
        store_of(S3Driver, CODEC, options(place.url, bucket=place.bucket))


def test_a_session_that_arrives_after_the_client_has_closed_leaves_no_connection(place: StubS3) -> None:
    gate = threading.Event()

    def session() -> Answer:
        gate.wait(30)
        return reply(200, SESSION)

    place.fault = rules(session)
    client = S3Client(open_access(options(place.url, bucket=place.bucket), soon()))
    with pytest.raises(StoreError, match="takes too long"):
        client.head("x", deadline=soon(0.05))
    client.close()
    gate.set()
    wait_for(lambda: place.received != [] and place.open_connections == 0)


def test_a_refused_session_is_reported_with_advice_and_requested_again(place: StubS3) -> None:
    answers = itertools.chain([error(403, "AccessDenied")], itertools.repeat(reply(200, SESSION)))
    place.fault = rules(lambda: next(answers))
    with pytest.raises(BackendUnavailable, match="s3express:CreateSession"):
        store_of(S3Driver, CODEC, options(place.url, bucket=place.bucket))
    store_of(S3Driver, CODEC, options(place.url, bucket=place.bucket)).close()
