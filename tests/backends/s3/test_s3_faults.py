"""A faulty S3 server causes outcomes and counted error kinds, never an exception or a long wait.

Each fault is tested with every verb. Control: the same verb succeeds after the fault.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.base import GetOutcome, SetOutcome, StoredPage
from hicache.backends.stored import StoredPages
from hicache.backends.tools.verify import NO_KEYS, verify_stored
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    NAMESPACE,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    empty_frames,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from tests.backends.s3.bucket import CODEC, PAGE, PATIENCE_S, errors, moves_pages, name, open_on, opened, options
from tests.backends.s3.stub import Answer, Request, StubS3, error, etag_of, reply
from tests.certificates import make_certificates
from tests.waiting import wait_for

pytestmark = pytest.mark.long

Fault = Callable[[Request], Answer | None]

# For silent servers; no other request has to succeed within this time.
_TIMEOUT_S = 0.3


def always(answer: Answer) -> Fault:
    return lambda request: answer


# For each fault, the error kind of a GET or PUT, and that of a HEAD, whose reply has no body with a code.
ANSWERED = {
    "SlowDown": (error(503, "SlowDown"), "throttled", "unavailable"),
    "503 without a body": (reply(503), "unavailable", "unavailable"),
    "429": (reply(429), "throttled", "throttled"),
    "InternalError": (error(500, "InternalError"), "server_error", "server_error"),
    "502 of a proxy": (reply(502, b"<html>bad gateway</html>"), "unavailable", "unavailable"),
    "AccessDenied": (error(403, "AccessDenied"), "access_denied", "access_denied"),
    "ExpiredToken": (error(400, "ExpiredToken"), "wrong_credentials", "bad_request"),
    "InvalidAccessKeyId": (error(403, "InvalidAccessKeyId"), "wrong_credentials", "access_denied"),
    "SignatureDoesNotMatch": (error(403, "SignatureDoesNotMatch"), "wrong_credentials", "access_denied"),
    "RequestTimeTooSkewed": (error(403, "RequestTimeTooSkewed"), "clock_skew", "access_denied"),
    "conflict": (error(409, "ConditionalRequestConflict"), "conflict", "conflict"),
    "BadDigest": (error(400, "BadDigest"), "checksum", "bad_request"),
}
UNANSWERED = {
    "no reply": (Answer(b"", "close"), "connection_lost"),
    "reset": (Answer(b"", "reset"), "connection_lost"),
    "half a head": (Answer(b"HTTP/1.1 200 OK\r\ncontent-le", "close"), "protocol"),
    "half an interim head": (Answer(b"HTTP/1.1 100 Continue\r\n", "close"), "protocol"),
    "garbage": (Answer(b"\x00\x01\x02\r\n\r\n\xff\r\n\r\n", "close"), "protocol"),
    "another protocol": (Answer(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "close"), "protocol"),
    "an endless head": (Answer(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, "close"), "protocol"),
    "silence": (Answer(b"", "hang"), "timeout"),
    "silence within the head": (Answer(b"HTTP/1.1 200 OK\r\ncontent-le", "hang"), "timeout"),
}
FAULTS = {**ANSWERED, **{name: (answer, kind, kind) for name, (answer, kind) in UNANSWERED.items()}}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server_is_an_outcome_of_every_verb_and_counted_by_its_kind(stub: StubS3, fault: str) -> None:
    answer, by_body, by_status = FAULTS[fault]
    is_silent = fault.startswith("silence")
    store, keys = open_on(stub, timeout=_TIMEOUT_S if is_silent else PATIENCE_S), make_keys(3)
    _fill(stub, keys[:2])
    stub.fault = always(answer)
    frames = full_frames(CODEC, keys)
    assert store.backend.batch_get(keys, frames, deadline=soon()) == [GET_ERROR] * 3
    assert errors(store) == {by_body: 3}
    assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [SET_ERROR] * 3
    # If a server closes the connection while a page is sent, the client may see only the reset.
    assert sum(errors(store).values()) == 6 and set(errors(store)) <= {by_body, "connection_lost"}
    before = errors(store).get(by_status, 0)
    assert store.backend.batch_exists(keys, deadline=soon()) == 0
    assert errors(store)[by_status] == before + 3
    assert store.backend.delete(keys, deadline=soon()) == 0
    assert store.backend.usage().pages == 0
    assert sum(errors(store).values()) == 13
    stub.fault = lambda request: None
    stub.released.set()
    assert set(stub.objects) == {name(key) for key in keys[:2]}
    if is_silent:
        wait_for(lambda: load(store, keys) == [HIT] * 3, lambda: store_chain(store, keys))
    else:
        assert store_chain(store, keys) == [PRESENT, PRESENT, STORED]
        assert load(store, keys) == [HIT] * 3
        assert sum(errors(store).values()) == 13


def _fill(stub: StubS3, keys: list[bytes]) -> None:
    """Subject pages through a separate backend."""
    store = open_on(stub)
    assert store_chain(store, keys) == [STORED] * len(keys)


def _page(store: Subject, stub: StubS3) -> tuple[bytes, bytes]:
    """Subject a page through `store`; return its key and bytes."""
    (key,) = make_keys(1)
    assert store_chain(store, [key]) == [STORED]
    return key, stub.objects[name(key)]


WHOLE = "content-length: {size}\r\n\r\n"
# Replies to a GET: the head after its status line, the body, what then happens to the connection, and the error kind.
REPLIES: dict[str, tuple[str, Callable[[bytes], bytes], str, str]] = {
    "short": (WHOLE, lambda data: data[:-1], "close", "short_body"),
    "very short": (WHOLE, lambda data: b"", "close", "short_body"),
    "stalled": (WHOLE, lambda data: data[: len(data) // 2], "hang", "timeout"),
    "reset in the middle": (WHOLE, lambda data: data[: len(data) // 2], "reset", "connection_lost|short_body"),
    "in chunks": (
        "transfer-encoding: chunked\r\n\r\n", lambda data: b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data), "keep",
        "protocol",
    ),
    **{f"headers {head!r}": (f"{head}\r\n\r\n", lambda data: data, "close", "protocol") for head in (
        "x-a: b", "content-length: 0x10", "content-length: -1", "content-length: 5\r\ncontent-length: 7",
        "content-length: " + "9" * 20, "no header at all",
    )},
    # A length without its last digits would not be a page's length, and would count as damage.
    **{f"cut after {head!r}": (head, lambda data: b"", "close", "protocol") for head in (
        "content-length: 1", "etag: \"x\"\r\ncontent-length: 12", "content-length: 12\r\netag: \"", "content-le", "",
    )},
}


@pytest.mark.parametrize("what", REPLIES)
def test_a_page_that_does_not_arrive_is_an_error_and_the_object_stays(
    stub: StubS3, raw: StoredPages, what: str
) -> None:
    head, body, then, kinds = REPLIES[what]
    store = open_on(stub, timeout=1.0) if then == "hang" else open_on(stub)
    key, data = _page(open_on(stub), stub)
    sent = f"HTTP/1.1 200 OK\r\n{head.format(size=len(data))}".encode() + body(data)
    stub.fault = lambda request: Answer(sent, then) if request.method == "GET" else None
    assert load(store, [key]) == [GET_ERROR]
    assert list(errors(store).values()) == [1] and set(errors(store)) <= set(kinds.split("|"))
    if what.startswith("cut"):
        with pytest.raises(BackendUnavailable):
            raw.read(StoredPage(NAMESPACE, key, len(data), None), 256)
    assert stub.objects == {name(key): data}
    stub.fault = lambda request: None
    wait_for(lambda: load(store, [key]) == [HIT])


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1, PAGE * 2, 10**12])
def test_a_length_that_no_page_has_is_damage_and_leaves_the_frame_alone(
    store: Subject, stub: StubS3, size: int
) -> None:
    key, data = _page(store, stub)
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\netag: {etag_of(data)}\r\n\r\n".encode()
    answers = {"GET": Answer(head + b"x" * min(size, PAGE), "close"), "HEAD": Answer(head)}
    for known, stays in ({"GET": answers["GET"]}, True), (answers, False):
        stub.fault = lambda request, known=known: known.get(request.method)  # type: ignore[misc]
        frame = memoryview(bytearray(b"\xee" * PAGE))
        assert store.backend.batch_get([key], [frame], deadline=soon()) == [CORRUPT]
        assert bytes(frame) == b"\xee" * PAGE
        assert (name(key) in stub.objects) is stays, "an object of another length was removed"
    assert dict(store.backend.statistics().corrupt) == {"size": 2}


MAINTENANCE = b"<html><body>Maintenance</body></html>"


@pytest.mark.parametrize("body", [MAINTENANCE, b"", bytes(PAGE)], ids=["a text", "nothing", "zeros"])
@pytest.mark.parametrize("to_head", [True, False])
def test_what_a_gateway_answers_instead_of_the_store_removes_no_object(
    store: Subject, stub: StubS3, body: bytes, to_head: bool
) -> None:
    """Without a tag the answer is a failure. With one, as of a file, it counts as damage that another object has."""
    key, data = _page(store, stub)
    for tag in ({}, {"etag": '"66f1-2a"'}):
        sent = reply(200, body, **tag)
        answers = {"GET": sent, **({"HEAD": Answer(sent.data[: -len(body) or None])} if to_head else {})}
        stub.fault = lambda request, answers=answers: answers.get(request.method)  # type: ignore[misc]
        assert load(store, [key]) == [CORRUPT if tag else GET_ERROR]
    assert errors(store) == {"protocol": 1}
    assert stub.objects == {name(key): data}
    stub.fault = lambda request: None
    assert load(store, [key]) == [HIT]


def test_a_scrub_through_a_gateway_removes_no_object(raw: StoredPages, stub: StubS3) -> None:
    """The control: one that answers as the store does removes the damaged ones, an empty one too."""
    keys = make_keys(20)
    store_chain(open_on(stub), keys)
    for key, damage in zip(keys, (b"", b"x" * PAGE), strict=False):
        stub.objects[name(key)] = damage
    stub.fault = lambda request: None if request.is_list or request.method != "GET" else reply(200, MAINTENANCE)
    *_, last = verify_stored(raw, keys=NO_KEYS, remove=True)
    assert (last.damaged, last.removed, last.spared, len(stub.objects)) == ({"unreadable": 20}, 0, 20, 20)
    stub.fault = lambda request: None
    *_, last = verify_stored(raw, keys=NO_KEYS, remove=True)
    assert (last.damaged, last.removed, last.spared) == ({"not_a_frame": 2}, 2, 0)
    assert sorted(stub.objects) == sorted(map(name, keys[2:]))


def test_a_damaged_page_that_was_replaced_stays(store: Subject, stub: StubS3) -> None:
    key, data = _page(store, stub)
    stub.fault = lambda request: reply(200, b"x" * PAGE, etag='"old"') if request.method == "GET" else None
    assert load(store, [key]) == [CORRUPT]
    assert stub.objects[name(key)] == data
    assert errors(store) == {}


@pytest.mark.parametrize(("answer", "expected"), [
    (error(404, "NoSuchKey"), {}), (reply(404), {}), (error(409, "ConditionalRequestConflict"), {}),
    (error(412, "PreconditionFailed"), {}), (error(404, "NoSuchBucket"), {"no_bucket": 1}),
    (error(403, "AccessDenied"), {"access_denied": 1}),
])
def test_a_damaged_page_that_another_engine_removed_or_replaced_is_not_an_error(
    store: Subject, stub: StubS3, answer: Answer, expected: dict[str, int]
) -> None:
    """The last two answers are the control."""
    key, _ = _page(store, stub)
    store.write(key, b"x" * PAGE)
    stub.fault = lambda request: answer if request.method == "DELETE" else None
    assert load(store, [key]) == [CORRUPT]
    assert errors(store) == expected


def test_a_damaged_page_is_removed_without_conditional_requests(store: Subject, stub: StubS3) -> None:
    """Also the control of the test above: the condition saves the page."""
    key, _ = _page(store, stub)
    store.write(key, b"x" * PAGE)

    def fault(request: Request) -> Answer | None:
        return error(501, "NotImplemented") if "if-match" in request.headers else None

    stub.fault = fault
    stub.forget_requests()
    assert load(store, [key]) == [CORRUPT]
    assert stub.methods() == ["GET", "HEAD", "DELETE", "DELETE"]
    assert name(key) not in stub.objects


def test_a_bucket_that_vanishes_is_an_error_and_not_a_miss(store: Subject, stub: StubS3) -> None:
    keys = make_keys(2)
    stub.fault = always(error(404, "NoSuchBucket"))
    assert load(store, keys) == [GET_ERROR] * 2
    assert store_chain(store, keys) == [SET_ERROR] * 2
    assert errors(store) == {"no_bucket": 4}


def test_a_full_store_rejects_the_page_and_its_tail(stub: StubS3) -> None:
    store, keys = open_on(stub, connections=1), make_keys(5)
    full_from = name(keys[2])
    stub.fault = lambda request: error(507, "InsufficientStorage") if request.name == full_from else None
    assert store_chain(store, keys) == [STORED] * 2 + [SetOutcome.REJECTED] * 3
    assert len(stub.objects) == 2
    assert errors(store) == {"no_space": 1}


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "InvalidRequest")])
def test_a_server_without_conditional_writes_is_detected_once(stub: StubS3, refusal: tuple[int, str]) -> None:
    store, keys = open_on(stub, connections=1), make_keys(3)
    stub.fault = lambda request: error(*refusal) if "if-none-match" in request.headers else None
    assert store_chain(store, keys) == [STORED] * 3
    assert stub.methods() == ["PUT", "HEAD", "PUT", "HEAD", "PUT", "HEAD", "PUT"]
    assert store_chain(store, keys) == [PRESENT] * 3
    assert errors(store) == {}


def test_each_page_is_requested_once_for_any_answer_of_the_server(store: Subject, stub: StubS3) -> None:
    keys = make_keys(20)
    stub.fault = always(error(503, "SlowDown"))
    load(store, keys)
    store_chain(store, keys)
    assert len(stub.requests) == 40


def test_an_idle_connection_that_the_server_closed_costs_no_page(stub: StubS3) -> None:
    store, keys = open_on(stub, connections=1), make_keys(3)
    store_chain(store, keys)
    data = {name(key): stub.objects[name(key)] for key in keys}
    stub.fault = lambda request: Answer(reply(200, data[request.name]).data, "close")
    for key in keys:
        assert load(store, [key]) == [HIT]
        wait_for(lambda: stub.open_connections == 0)
    assert errors(store) == {}
    assert stub.connections >= 3


def test_a_connection_that_closes_under_a_request_is_replaced_once_if_it_was_idle(stub: StubS3) -> None:
    """The server times out the connection at that moment. Control: "no reply" on a new connection is an error."""
    store, keys, count = open_on(stub, connections=1), make_keys(3), itertools.count()
    store_chain(store, keys)
    stub.fault = lambda request: None if next(count) % 2 else Answer(b"", "close")
    assert load(store, keys) == [HIT] * 3
    assert errors(store) == {}
    stub.fault = always(Answer(b"", "close"))
    stub.forget_requests()
    assert load(store, keys[:1]) == [GET_ERROR]
    assert len(stub.requests) <= 2


@pytest.mark.parametrize("tls", [False, True])
def test_connections_are_reused(stub: StubS3, tmp_path: Path, tls: bool) -> None:
    """The control of the test above."""
    certificates, keys = make_certificates(tmp_path), make_keys(10)
    with StubS3("pages", certificates.server_context() if tls else None) as server:
        with opened(options(server.url, connections=1, ca_file=certificates.ca_file if tls else None)) as store:
            moves_pages(store, keys)
            load(store, make_keys(3, "missing"))
            store.backend.batch_exists(keys, deadline=soon())
        assert server.connections <= 2


@pytest.mark.parametrize("tls", [False, True])
def test_the_rest_of_a_reply_is_never_read_as_the_next_reply(stub: StubS3, tmp_path: Path, tls: bool) -> None:
    certificates, keys = make_certificates(tmp_path), make_keys(3)
    codec = FrameCodec(NAMESPACE, 60_000)  # more than arrives together with a head
    with StubS3("pages", certificates.server_context() if tls else None) as server:
        chosen = options(server.url, connections=1, ca_file=certificates.ca_file if tls else None)
        with opened(chosen, codec) as store:
            store_chain(store, keys)
            data, rest = dict(server.objects), reply(404, b"").data
            server.fault = lambda request: Answer(reply(200, data[request.name]).data + rest)
            assert load(store, keys) == [HIT] * 3
            assert errors(store) == {}


def test_each_verb_ends_by_its_deadline_while_the_server_is_silent(stub: StubS3) -> None:
    """The timeout for a byte is an hour here, so without the deadline the test would not end. `close` would not end if
    a request outlived its verb."""
    store, keys = open_on(stub, timeout=3600), make_keys(6)
    stub.fault = always(Answer(b"", "hang"))
    frames = full_frames(CODEC, keys)
    assert store.backend.batch_get(keys, frames, deadline=soon(0.2)) == [GET_ERROR] * 6
    assert store.backend.batch_set(keys, frames, parent=None, deadline=soon(0.2)) == [SET_ERROR] * 6
    assert store.backend.batch_exists(keys, deadline=soon(0.2)) == 0
    assert store.backend.delete(keys, deadline=soon(0.2)) == 0
    assert set(errors(store)) <= {"timeout", "deadline"}
    store.backend.close()
    stub.released.set()


def test_a_page_is_sent_with_its_type_and_without_waiting_for_100_continue(store: Subject, stub: StubS3) -> None:
    """Some servers store an empty object if a body without a type is cut at its start."""
    _page(store, stub)
    (request,) = stub.requests
    assert request.headers["content-type"] == "application/octet-stream"
    assert "expect" not in request.headers


@pytest.mark.parametrize("body", ["short", "stalled", "no reply"])
def test_nothing_holds_a_frame_once_the_verb_has_returned(stub: StubS3, body: str) -> None:
    """Not even an exception that waits for the garbage collector: memory with a view cannot be freed."""
    store = open_on(stub, timeout=_TIMEOUT_S if body == "stalled" else PATIENCE_S)
    answer = Answer(f"HTTP/1.1 200 OK\r\ncontent-length: {PAGE}\r\n\r\nx".encode(), "close")
    answers = {"short": answer, "stalled": Answer(answer.data, "hang"), "no reply": Answer(b"", "close")}
    stub.fault = always(answers[body])
    memory = bytearray(PAGE)
    gc.collect()
    gc.disable()
    try:
        frames = [memoryview(memory)]
        assert store.backend.batch_get(make_keys(1), frames, deadline=soon()) == [GET_ERROR]
        if body == "no reply":
            assert store.backend.batch_set(make_keys(1), frames, parent=None, deadline=soon()) == [SET_ERROR]
        del frames
        memory.append(0)  # raises BufferError while a view of it exists
    finally:
        gc.enable()


def test_an_infinite_deadline_still_has_the_timeout(stub: StubS3) -> None:
    store, keys = open_on(stub, timeout=_TIMEOUT_S), make_keys(2)
    stub.fault = always(Answer(b"", "hang"))
    assert store.backend.batch_get(keys, empty_frames(CODEC, 2), deadline=math.inf) == [GetOutcome.ERROR] * 2
    assert errors(store) == {"timeout": 2}
