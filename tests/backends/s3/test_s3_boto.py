"""Features of the boto3 client, and the limits that it shares with the direct client. The contract is in test_s3."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from hicache.backends.s3 import S3Backend
from hicache.backends.testing import GET_ERROR, HIT, SET_ERROR, STORED, Store, load, make_keys, soon, store_chain
from tests.backends.s3.bucket import CODEC, errors, name, open_on, options
from tests.backends.s3.stub import Answer, Request, StubS3, error, reply
from tests.backends.s3.test_s3_faults import BODIES, FAULTS, always
from tests.backends.s3.test_s3_hostile import ENDLESS
from tests.certificates import make_certificates

pytestmark = pytest.mark.long

KEYS = make_keys(3)
_SESSION = b"""<CreateSessionResult><Credentials><SessionToken>a-session</SessionToken>
<SecretAccessKey>s</SecretAccessKey><AccessKeyId>id</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"""


@pytest.fixture
def boto(stub: StubS3) -> Iterator[Store]:
    """A backend on the stub, through boto3."""
    found = open_on(stub, client="boto3", timeout=2.0)
    yield found
    stub.released.set()
    found.backend.close()


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"half an interim head"}))  # http.client: a lost connection
def test_a_fault_is_counted_by_its_kind_and_nothing_is_retried(boto: Store, stub: StubS3, fault: str) -> None:
    answer, by_body, by_status = FAULTS[fault]
    stub.fault = always(answer)
    assert load(boto, KEYS) == [GET_ERROR] * 3
    assert errors(boto) == {by_body: 3}
    assert store_chain(boto, KEYS) == [SET_ERROR] * 3
    before = errors(boto).get(by_status, 0)
    assert boto.backend.batch_exists(KEYS, deadline=soon()) == 0
    assert errors(boto)[by_status] == before + 3
    assert len(stub.requests) <= 9


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_does_not_arrive_is_an_error_and_the_object_stays(boto: Store, stub: StubS3, body: str) -> None:
    head, change, then, expected = BODIES[body]
    assert store_chain(boto, KEYS[:1]) == [STORED]
    data = stub.objects[name(KEYS[0])]
    sent = f"HTTP/1.1 200 OK\r\n{head.format(size=len(data))}\r\n\r\n".encode() + change(data)
    stub.fault = lambda request: Answer(sent, then) if request.method == "GET" else None
    assert load(boto, KEYS[:1]) == [GET_ERROR]
    assert expected is None or errors(boto) == {expected: 1}
    assert name(KEYS[0]) in stub.objects


def test_a_head_that_is_cut_within_its_length_costs_no_stored_page(boto: Store, stub: StubS3) -> None:
    assert store_chain(boto, KEYS[:1]) == [STORED]
    stub.fault = lambda request: Answer(b"HTTP/1.1 200 OK\r\netag: \"x\"\r\ncontent-length: 12", "close")
    assert load(boto, KEYS[:1]) == [GET_ERROR]
    assert name(KEYS[0]) in stub.objects


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_reply_is_abandoned_after_some_bytes(boto: Store, stub: StubS3, what: str) -> None:
    start, piece = ENDLESS[what]
    sent = itertools.count()
    stub.fault = always(Answer(start, more=(piece for _ in iter(stub.released.is_set, True) if next(sent) >= 0)))
    assert load(boto, KEYS[:1]) == [GET_ERROR]
    assert next(sent) * len(piece) < 32 << 20


def test_a_request_ends_at_its_deadline_despite_endless_interim_replies(boto: Store, stub: StubS3) -> None:
    """http.client reads interim replies as long as they arrive. `close` returns only if the thread has ended."""
    piece = b"HTTP/1.1 100 Continue\r\n\r\n"
    stub.fault = always(Answer(piece, more=(piece for _ in iter(stub.released.is_set, True))))
    assert boto.backend.batch_exists(KEYS[:1], deadline=time.monotonic() + 0.2) == 0
    assert errors(boto) == {"timeout": 1}
    boto.backend.close()


def test_the_proxy_of_the_environment_gets_its_password(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the store's host name has no address here."""
    stub.origin = "http://store.invalid:9000"
    monkeypatch.setenv("http_proxy", f"http://me:pass%20word@127.0.0.1:{stub.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    backend = S3Backend(CODEC, options(stub.origin, client="boto3"))
    store = Store(backend, lambda key: None, lambda key, data: None)
    assert store_chain(store, KEYS) == [STORED] * 3
    assert load(store, KEYS) == [HIT] * 3
    assert {request.headers["proxy-authorization"] for request in stub.requests} == {"Basic bWU6cGFzcyB3b3Jk"}
    backend.close()


def test_a_directory_bucket_gets_a_session(monkeypatch: pytest.MonkeyPatch, stub: StubS3) -> None:
    """On a stub that answers as documented for S3 Express."""
    with StubS3("pages--use1-az4--x-s3") as server:
        sessions = itertools.count()

        def fault(request: Request) -> Answer | None:
            return reply(200, _SESSION) if "session" in request.query and next(sessions) >= 0 else None

        server.fault = fault
        backend = S3Backend(CODEC, options(server.url, client="boto3", bucket=server.bucket))
        store = Store(backend, lambda key: None, lambda key, data: None)
        assert store_chain(store, KEYS) == [STORED] * 3
        tokens = {r.headers.get("x-amz-s3session-token") for r in server.requests if r.method == "PUT"}
        assert tokens == {"a-session"} and next(sessions) >= 1
        backend.close()


def test_a_page_goes_over_tls(stub: StubS3, tmp_path_factory: pytest.TempPathFactory) -> None:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with StubS3("pages", certificates.server_context()) as server:
        backend = S3Backend(CODEC, options(server.url, client="boto3", ca_file=certificates.ca_file, connections=1))
        store = Store(backend, lambda key: None, lambda key, data: None)
        assert store_chain(store, KEYS) == [STORED] * 3
        assert load(store, KEYS) == [HIT] * 3
        assert server.connections <= 2
        backend.close()


def test_a_pause_requested_by_the_server_is_respected(boto: Store, stub: StubS3) -> None:
    stub.fault = always(error(503, "SlowDown", retry_after="60"))
    load(boto, KEYS[:1])
    sent = len(stub.requests)
    assert load(boto, KEYS) == [GET_ERROR] * 3
    assert len(stub.requests) == sent
