"""Single hostile replies: a store must not control our requests, messages, memory or time.

`tests/hostile` generates such replies at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.http import request_head
from hicache.backends.s3 import S3Driver
from hicache.backends.s3.replies import LISTING_BYTES_MAX, failed_reply, read_document, read_listing
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable, ConfigError
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    NAMESPACE,
    Subject,
    load,
    make_keys,
    soon,
    store_chain,
    store_of,
)
from tests.backends.s3.bucket import CODEC, PAGE, errors, name, open_on, options
from tests.backends.s3.stub import Answer, Request, StubS3, error, reply

pytestmark = pytest.mark.long

KEYS = make_keys(2)


def damaged(etag: str) -> Callable[[Request], Answer | None]:
    """Return a fault that answers with damaged pages under an ETag."""
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {PAGE}\r\netag: {etag}\r\n\r\n".encode("latin-1")
    bodies = {"GET": b"x" * PAGE, "HEAD": b""}
    return lambda request: Answer(head + bodies[request.method]) if request.method in bodies else None


@pytest.mark.parametrize(
    ("etag", "sent"),
    [('"abc"', True), ('W/"abc"', True), ("abc", False), ('"a"b"', False), ('"\xe9"', False),
     *((f'"a{split}x-injected: 1"', False) for split in ("\n", "\r", "\x00", "\x0b", "\x7f", "\n "))],
)
def test_an_etag_is_sent_only_if_it_is_an_entity_tag(store: Subject, stub: StubS3, etag: str, sent: bool) -> None:
    """An invalid tag is only compared with that of a second reply. A tag that ends its header also makes the reply
    invalid."""
    store_chain(store, KEYS[:1])
    stub.forget_requests()
    stub.fault = damaged(etag)
    (outcome,) = load(store, KEYS[:1])
    assert outcome is CORRUPT or (outcome is GET_ERROR and "injected" in etag)
    tags = [request.headers.get("if-match", "") for request in stub.requests if request.method == "DELETE"]
    assert tags == [etag if sent else ""] * (outcome is CORRUPT)
    assert not any("x-injected" in request.headers for request in stub.requests)
    assert (name(KEYS[0]) in stub.objects) is (sent or outcome is GET_ERROR), "the page has another etag"


@pytest.mark.parametrize(
    ("target", "headers"),
    [("/a\r\nx: y", {}), ("/a b", {}), ("/\x00", {}), ("/\xe9", {}), ("a", {}), ("/a", {"if-match": "a\nx: y"}),
     ("/a", {"if-match": "a\r"}), ("/a", {"x": "\x00"}), ("/a", {"x": "\ud800"}), ("/a", {"x y": "z"})],
)
def test_a_request_with_a_forbidden_character_is_not_sent(target: str, headers: dict[str, str]) -> None:
    with pytest.raises(StoreError) as caught:
        request_head("GET", target, headers)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert request_head("GET", "/a", {"x": "y z"}) == b"GET /a HTTP/1.1\r\nx: y z\r\n\r\n", "the control"


@pytest.mark.parametrize("value", ["a-key\n", "a\rb", "a\tb", "a b", "\udcff", "\xe9"])
@pytest.mark.parametrize("variable", ["S3_ACCESS_KEY", "S3_TOKEN"])
def test_credentials_with_invalid_characters_are_refused_at_start(
    stub: StubS3, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("S3_TOKEN", "a-token")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="contain characters"):
        store_of(S3Driver, CODEC, options(stub.url, session_token_env="S3_TOKEN"))
    monkeypatch.setenv(variable, "a-key")
    store_of(S3Driver, CODEC, options(stub.url, session_token_env="S3_TOKEN")).close()


def _listing(inside: str, root: str = "ListBucketResult") -> Callable[[Request], Answer | None]:
    return lambda request: reply(200, f"<{root}>{inside}</{root}>".encode()) if request.is_list else None


WHOLE, PART = "<IsTruncated>false</IsTruncated>", "<IsTruncated>true</IsTruncated>"
LISTINGS = {
    "the same token": PART + "<NextContinuationToken>same</NextContinuationToken>",
    "no token": PART,
    "an empty token": PART + "<NextContinuationToken/>",
    "a long token": PART + f"<NextContinuationToken>{'x' * 100_000}</NextContinuationToken>",
    "not said whether whole": "<Contents/>",
    "a size of other digits": WHOLE + "<Contents><Size>\u00b2</Size></Contents>",
    "a size below zero": WHOLE + "<Contents><Size>-1</Size></Contents>",
    "a long size": WHOLE + f"<Contents><Size>{'9' * 5000}</Size></Contents>",
    "more than was asked for": WHOLE + "<Contents/>" * 1001,
    "deep": WHOLE + "<a>" * 5000 + "</a>" * 5000,
}


@pytest.mark.parametrize("listing", LISTINGS)
def test_an_invalid_listing_is_an_error(store: Subject, raw: StoredPages, stub: StubS3, listing: str) -> None:
    stub.fault = _listing(LISTINGS[listing])
    with pytest.raises(BackendUnavailable, match="protocol"):
        list(raw.pages())
    store.backend.usage()
    assert errors(store) == {"protocol": 1}


def test_a_listing_with_a_cycle_of_tokens_is_an_error(stub: StubS3) -> None:
    raw, tokens = StoredPages(S3Driver(None, options(stub.url)), "s3"), itertools.cycle("abcde")
    stub.fault = lambda request: reply(
        200, f"<ListBucketResult>{PART}<NextContinuationToken>{next(tokens)}</NextContinuationToken></ListBucketResult>"
        .encode())
    with pytest.raises(BackendUnavailable, match="repeats an earlier token"):
        list(raw.pages())
    raw.close()


@pytest.mark.parametrize("date", ["99999-01-01T00:00:00Z", "0001-01-01T00:00:00", "yesterday", "9" * 5000])
def test_a_date_out_of_range_is_unknown(raw: StoredPages, stub: StubS3, date: str) -> None:
    stub.fault = _listing(f"{WHOLE}<Contents><Key>{name(KEYS[0])}</Key><LastModified>{date}</LastModified></Contents>")
    assert [page.key for page in raw.pages()] == [KEYS[0]]


@pytest.mark.parametrize("encoding", ["no-such", "idna", "hex", "utf-16", "unicode_escape", "punycode", "big5", ""])
@pytest.mark.parametrize("status", [200, 400])
def test_the_declared_encoding_of_a_document_is_ignored(
    store: Subject, stub: StubS3, encoding: str, status: int
) -> None:
    body = f'<?xml version="1.0" encoding="{encoding}"?><Error><Code>a\u00fc</Code></Error>'.encode()
    stub.fault = lambda request: reply(status, body)
    store_chain(store, KEYS)
    store.backend.usage()
    assert "internal" not in errors(store)


def test_parsing_takes_at_most_a_small_multiple_of_a_documents_bytes() -> None:
    laughs = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 9))
    for body in (
        f'<!DOCTYPE x [<!ENTITY a0 "ha">{laughs}]><Error><Code>&a8;</Code></Error>',
        "<x " + " ".join(f"a{n}=''" for n in range(100_000)) + "/>", "<x>" + "<y/>" * (LISTING_BYTES_MAX // 4) + "</x>",
        "<x>" * (LISTING_BYTES_MAX // 3), "<x>" + "".join(f"<e{n}/>" for n in range(500_000)) + "</x>",
    ):
        with pytest.raises(StoreError):
            read_document(body.encode())
    entry = "<Contents><Key>k</Key><Size>1</Size><Owner><ID>x</ID><DisplayName>y</DisplayName></Owner></Contents>"
    root = "ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'"
    whole = f"<{root}>{WHOLE}{entry * 1000}</ListBucketResult>"
    assert len(read_listing(whole.encode()).objects) == 1000, "the control"


def test_a_server_cannot_have_more_errors_than_objects_to_remove(store: Subject, stub: StubS3) -> None:
    store_chain(store, KEYS)
    body = b"<DeleteResult>" + b"<Error><Code>AccessDenied</Code></Error>" * 5 + b"</DeleteResult>"
    stub.fault = lambda request: reply(200, body) if request.method == "POST" else None
    assert store.backend.delete(KEYS, deadline=soon()) == 0
    assert errors(store) == {"protocol": 1}


@pytest.mark.parametrize("code", ["<b>x</b>", "", "<Code>a</Code>", "SlowDown</Code><Code>b", "\u00fc"])
def test_an_unknown_code_falls_back_to_the_kind_of_the_status(store: Subject, stub: StubS3, code: str) -> None:
    stub.fault = lambda request: error(403, code)
    load(store, KEYS)
    assert set(errors(store)) <= {"access_denied", "throttled"} and sum(errors(store).values()) == 2


def test_text_echoed_by_a_server_gets_into_no_message(stub: StubS3) -> None:
    told = "AnAccessKey"
    assert told not in str(failed_reply(403, told)) and "AccessDenied" in str(failed_reply(403, "AccessDenied"))
    stub.fault = lambda request: error(403, told)
    with pytest.raises(BackendUnavailable) as caught:
        store_of(S3Driver, CODEC, options(stub.url))
    assert told not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400])
def test_redirections_are_not_followed_and_regions_are_not_requested(stub: StubS3, status: int) -> None:
    with StubS3("pages") as elsewhere:
        store = open_on(stub)
        stub.forget_requests()
        stub.fault = lambda request: reply(
            status, b"<Error><Code>PermanentRedirect</Code><Region>eu-west-1</Region></Error>",
            location=elsewhere.url + "/pages/x", x_amz_bucket_region="eu-west-1",
        )
        store.backend.batch_exists(KEYS[:1], deadline=soon())
        assert load(store, KEYS[:1]) == [GET_ERROR]
        assert stub.methods() == ["HEAD", "GET"] and not elsewhere.connections


def test_memory_is_taken_for_received_and_not_for_announced_bytes(raw: StoredPages, stub: StubS3) -> None:
    head = b'HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\netag: "x"\r\n\r\n'
    stub.fault = lambda request: Answer(head + b"x", "close")
    with pytest.raises(BackendUnavailable):
        raw.read(StoredPage(NAMESPACE, KEYS[0], 1, None), 1 << 50)


ENDLESS = {
    "chunks": (b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n", b"1;" + b"x" * 3000 + b"\r\ny\r\n"),
    "trailers": (b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
    "a chunk below zero": (b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n", b"x" * 4096),
    "a line of a chunk": (b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n", b"1" * 4096),
    "a body": (b"HTTP/1.1 500 x\r\n\r\n", b"x" * 4096),
    "a head": (b"HTTP/1.1 500 x\r\n", b"x: y\r\n" * 100),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_reply_is_abandoned_after_some_bytes(store: Subject, stub: StubS3, what: str) -> None:
    """Neither the deadline nor a timeout ends it. Control: the server would send forever."""
    start, piece = ENDLESS[what]
    sent = itertools.count()

    def endless() -> Any:
        while not stub.released.is_set():
            next(sent)
            yield piece

    stub.fault = lambda request: Answer(start, more=endless())
    assert load(store, KEYS[:1]) == [GET_ERROR]
    assert next(sent) * len(piece) < 32 << 20
