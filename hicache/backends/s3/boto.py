"""The client that goes through boto3, for what our own does not do: proxies, special endpoints of AWS, its logging.

It costs two to seven times the processor time per byte. A request of botocore cannot be told when to end, so each is
made on a thread of its own that has no buffer of a page: the caller waits up to its deadline, then shuts the connection
down, so that the thread ends too. A body to be stored is copied for that reason, into one piece; one that is read is
copied into its buffers by the caller's own thread, which ends at the deadline.

botocore and urllib3 read bodies, chunks and XML of any size. Here bodies are read before botocore sees them, as the
direct client reads them, and botocore parses only documents within its bounds. Heads are http.client's: 100 headers of
64 KiB at most, and interim replies until the deadline.

Locking design: boto3's client and the executor are safe for threads. `_Call.connection` is set by the thread of the
request and read by its caller; both are single references.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import botocore.awsrequest
import botocore.config
import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from ...frame import TagStream, fill
from ..errors import ErrorKind, StoreError
from .access import Access
from .client import Listed, Listing, ObjectInfo, Target
from .http import HEADER_VALUE, content_length, read_chunks
from .replies import ERROR_BYTES_MAX, LISTING_BYTES_MAX, error_code, expect_root, failed_reply, usable_token

# About as much as a socket holds.
_PIECE_BYTES = 256 << 10
# Lines around the chunks of a body: longer ones are cut, and then refused.
_LINE_BYTES_MAX = 4096
# Waiting for ever is none of what `Future.result` can do with a number.
_WAIT_MAX_S = 86_400.0
# The operations whose replies are documents that botocore reads, and the roots of these. It makes sessions by itself,
# for directory buckets.
_ROOTS = {
    "ListObjectsV2": "ListBucketResult", "DeleteObjects": "DeleteResult", "CreateSession": "CreateSessionResult",
}  # fmt: skip
# botocore's exceptions have no common field that says what happened. The first that fits, from the narrow to the wide.
_BY_EXCEPTION: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (botocore.exceptions.SSLError, ErrorKind.TLS),
    (botocore.exceptions.ConnectTimeoutError, ErrorKind.TIMEOUT),
    (botocore.exceptions.ReadTimeoutError, ErrorKind.TIMEOUT),
    (botocore.exceptions.EndpointConnectionError, ErrorKind.CONNECTION_REFUSED),
    (botocore.exceptions.ProxyConnectionError, ErrorKind.UNREACHABLE),
    (botocore.exceptions.ConnectionClosedError, ErrorKind.CONNECTION_LOST),
    (botocore.exceptions.IncompleteReadError, ErrorKind.SHORT_BODY),
    (botocore.exceptions.NoCredentialsError, ErrorKind.WRONG_CREDENTIALS),
    (botocore.exceptions.CredentialRetrievalError, ErrorKind.WRONG_CREDENTIALS),
    (botocore.exceptions.ResponseStreamingError, ErrorKind.SHORT_BODY),
    (botocore.exceptions.HTTPClientError, ErrorKind.CONNECTION_LOST),
    (botocore.exceptions.BotoCoreError, ErrorKind.PROTOCOL),
    (urllib3.exceptions.TimeoutError, ErrorKind.TIMEOUT),
    (urllib3.exceptions.HTTPError, ErrorKind.SHORT_BODY),
    (TimeoutError, ErrorKind.TIMEOUT),
    (OSError, ErrorKind.UNREACHABLE),
    # What botocore's parsers and http.client make of replies that are not those of S3: numbers that are none, dates
    # out of range, elements in other places.
    (botocore.parsers.ResponseParserError, ErrorKind.PROTOCOL),
    (http.client.HTTPException, ErrorKind.PROTOCOL),
    (ValueError, ErrorKind.PROTOCOL),
    (TypeError, ErrorKind.PROTOCOL),
    (LookupError, ErrorKind.PROTOCOL),
    (AttributeError, ErrorKind.PROTOCOL),
    (ArithmeticError, ErrorKind.PROTOCOL),
    (RuntimeError, ErrorKind.PROTOCOL),
)
_KNOWN = tuple(cls for cls, _ in _BY_EXCEPTION)
_this_thread = threading.local()


class _Call:
    """One request, and what ends it from another thread."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.reply: Any = None
        self._is_over = False

    def end(self) -> None:
        """Let the thread of the request find its connection closed."""
        self._is_over = True
        connection = self.connection
        sock = None if connection is None or connection.call is not self else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not of the class for TLS, whose state belongs to the thread that reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise TimeoutError if nobody waits for the request any more."""
        if self._is_over:
            raise TimeoutError

    def drop(self) -> None:
        """Close the connection if its reply was not read to the end: neither botocore nor urllib3 does in each case."""
        if self.reply is not None and not self.reply.isclosed():
            self.connection.close()
            self.reply.close()


class _Reply(http.client.HTTPResponse):
    """A reply whose head is refused where it is not what HTTP allows; urllib3 would log it and go on."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        _this_thread.call.reply = self

    def begin(self) -> None:
        """See http.client.HTTPResponse."""
        super().begin()
        if self.headers.defects or not all(map(HEADER_VALUE.fullmatch, self.headers.values())):
            raise http.client.HTTPException("a line of the head is not a header")


class _Endable:
    """A connection that knows the request it is used for."""

    response_class = _Reply
    call: _Call | None = None

    def connect(self) -> None:
        """See http.client.HTTPConnection."""
        super().connect()  # type: ignore[misc]
        _this_thread.call.check()

    def request(self, *args: Any, **more: Any) -> None:
        """See http.client.HTTPConnection."""
        self.call = _this_thread.call
        _this_thread.call.connection = self
        super().request(*args, **more)  # type: ignore[misc]


class _Connection(_Endable, botocore.awsrequest.AWSHTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Endable, botocore.awsrequest.AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool(botocore.awsrequest.AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TlsPool(botocore.awsrequest.AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


class BotoClient:
    """A Client (see there) that uses botocore's client for S3. Blocks and raises as botocore does when it is made."""

    def __init__(self, access: Access) -> None:
        options, fixed = access.options, access.fixed
        keys: dict[str, str | None] = {}
        if fixed is not None:
            keys = {
                "aws_access_key_id": fixed.access_key,
                "aws_secret_access_key": fixed.secret_key,
                "aws_session_token": fixed.session_token,
            }
        self._timeout_s = options.timeout
        self._bucket = options.bucket
        self._client: Any = access.session.create_client(
            "s3",
            region_name=access.region,
            endpoint_url=options.endpoint_url,
            verify=None if options.ca_file is None else str(options.ca_file),
            config=botocore.config.Config(
                connect_timeout=options.connect_timeout,
                read_timeout=options.timeout,
                max_pool_connections=options.connections,
                retries={"total_max_attempts": 1},
                request_checksum_calculation=options.checksum,
                response_checksum_validation="when_required",
                s3={
                    "addressing_style": "path" if access.path_style else "virtual",
                    "payload_signing_enabled": options.sign_payload,
                },
            ),
            **keys,
        )
        self._session: Any = self._client._endpoint.http_session
        self._session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)
        self._client.meta.events.register("before-send.s3", self._send)
        self._client.meta.events.register_last("before-parameter-build.s3", _without_redirection)
        self._threads = concurrent.futures.ThreadPoolExecutor(options.connections, "hicache-s3-boto")

    def _call(self, method: Callable[..., Any], deadline: float, **parameters: Any) -> Mapping[str, Any]:
        """The reply of one request. Raises StoreError, of the kind _Refused for replies that are errors."""
        call = _Call()
        future = self._threads.submit(_made, call, method, {"Bucket": self._bucket, **parameters})
        try:
            reply: Mapping[str, Any] = future.result(max(0.0, min(deadline - time.monotonic(), _WAIT_MAX_S)))
            return reply
        except concurrent.futures.TimeoutError:
            future.cancel()  # if it has not begun: nobody knows what it would meet by then
            future.add_done_callback(_drop)
            call.end()
            raise StoreError(ErrorKind.TIMEOUT) from None
        finally:
            del future  # it holds the exception, which holds this call and with it the views of its callers

    def _send(self, request: Any, event_name: str, **_: Any) -> Any:
        """Send a request for botocore, and read its reply unless that is a page. Raises StoreError and what urllib3
        raises."""
        # A body is sent without being asked to. It costs a round trip less, and botocore reads for ever where a
        # connection ends within the reply that asks for the body.
        request.headers.pop("Expect", None)
        is_page, request.stream_output = request.stream_output, True
        response = self._session.send(request)
        root, status = _ROOTS.get(event_name.rpartition(".")[2]), response.status_code
        if is_page and 200 <= status < 300:
            return response
        if status < 200 or status == 300:  # botocore takes these for a success
            raise StoreError(ErrorKind.PROTOCOL, f"a reply of status {status}")
        has_body = request.method != "HEAD" and status not in (204, 304)
        body = _read_small(response.raw, LISTING_BYTES_MAX if root else ERROR_BYTES_MAX) if has_body else b""
        response.raw._fp.close()  # it is read to its end, so the connection can be used again
        response.raw.release_conn()
        if status > 300:
            code = error_code(body)
            body = f"<Error><Code>{code}</Code></Error>".encode() if code.isascii() and code.isalnum() else b""
        elif root:
            expect_root(body, root)
        else:
            body = b""
        response._content = body
        return response

    def head(self, name: str, *, deadline: float) -> ObjectInfo | None:
        """See Client."""
        try:
            reply = self._call(self._client.head_object, deadline, Key=name)
        except _Refused as refused:
            refused.unless(404)
            return None
        _require(reply, "ETag")
        return ObjectInfo(_length(reply) if "ContentLength" in reply else 0, reply["ETag"])

    def get(
        self, name: str, target: Target, arrived: TagStream | None = None, *, deadline: float
    ) -> ObjectInfo | None:
        """See Client."""
        try:
            reply = self._call(self._client.get_object, deadline, Key=name)
        except _Refused as refused:
            refused.unless(404)
            return None
        with contextlib.closing(reply["Body"]) as body:
            size = _length(reply)
            # A head that was cut off within its length looks whole to botocore, but nothing comes after it.
            self._read(body, target(size) or [memoryview(bytearray(min(size, 1)))], deadline, arrived)
            return ObjectInfo(size, reply.get("ETag", ""))

    def _read(
        self, body: Any, target: Sequence[memoryview], deadline: float, arrived: TagStream | None = None
    ) -> None:
        # botocore's own ways to read wait until all has come, each time anew for as long as a byte may take.
        stream, size = body._raw_stream, sum(buffer.nbytes for buffer in target)
        done = 0
        try:
            while done < size:
                left = min(self._timeout_s, deadline - time.monotonic())
                if left <= 0:
                    raise StoreError(ErrorKind.TIMEOUT)
                body.set_socket_timeout(left)
                piece = memoryview(stream.read1(min(size - done, _PIECE_BYTES)))
                if not piece:
                    raise StoreError(ErrorKind.SHORT_BODY, f"{done} of {size} bytes came")
                if arrived is not None:
                    arrived.add(piece)
                target = fill(target, piece)
                done += len(piece)
        except _KNOWN as error:
            raise _failed(error) from error

    def get_start(self, name: str, bytes_max: int, *, deadline: float) -> bytes | None:
        """See Client."""
        try:
            reply = self._call(self._client.get_object, deadline, Key=name, Range=f"bytes=0-{bytes_max - 1}")
        except _Refused as refused:
            if refused.status == 416:  # an empty object has no first byte
                return b""
            refused.unless(404)
            return None
        with contextlib.closing(reply["Body"]) as body:
            left, data = min(_length(reply), bytes_max), bytearray()
            while len(data) < left:  # memory is taken for what has come
                piece = bytearray(min(left - len(data), _PIECE_BYTES))
                self._read(body, [memoryview(piece)], deadline)
                data += piece
        return bytes(data)

    def put(self, name: str, body: Sequence[memoryview], *, if_absent: bool, deadline: float) -> bool:
        """See Client."""
        # Without a type, SeaweedFS stores an empty object when the connection ends before the body's first byte.
        more = {"ContentType": "application/octet-stream", **({"IfNoneMatch": "*"} if if_absent else {})}
        try:
            reply = self._call(self._client.put_object, deadline, Key=name, Body=b"".join(body), **more)
        except _Refused as refused:
            if if_absent and refused.status == 412:
                return False
            raise
        _require(reply, "ETag")
        return True

    def remove(self, name: str, etag: str, *, deadline: float) -> None:
        """See Client."""
        condition = {"IfMatch": etag} if etag else {}
        try:
            self._call(self._client.delete_object, deadline, Key=name, **condition)
        except _Refused as refused:
            refused.unless(404, 409, 412)

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """See Client."""
        chosen = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        reply = self._call(self._client.delete_objects, deadline, Delete=chosen)
        return [failed_reply(400, error.get("Code", "")).kind for error in reply.get("Errors", ())]

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """See Client."""
        more = {} if token is None else {"ContinuationToken": token}
        reply = self._call(self._client.list_objects_v2, deadline, Prefix=prefix, MaxKeys=keys_max, **more)
        _require(reply, "IsTruncated")
        objects = [_listed(entry) for entry in reply.get("Contents", ())]
        return Listing(objects, usable_token(reply.get("NextContinuationToken", "")) if reply["IsTruncated"] else None)

    def close(self) -> None:
        """See Client. Waits for requests that were left to end by themselves."""
        self._threads.shutdown()
        self._client.close()


class _Refused(StoreError):
    """A reply that is an error."""

    def __init__(self, error: botocore.exceptions.ClientError) -> None:
        about, code = error.response.get("ResponseMetadata", {}), error.response.get("Error", {}).get("Code", "")
        self.status: int = about.get("HTTPStatusCode", 0)
        self.code: str = code
        known = failed_reply(self.status, code, about.get("HTTPHeaders", {}).get("retry-after", ""))
        super().__init__(known.kind, str(known), retry_after_s=known.retry_after_s)

    def unless(self, *statuses: int) -> None:
        """Raise it, unless it has one of these statuses and is about the object."""
        if self.status not in statuses or self.code == "NoSuchBucket":
            raise self


def _require(reply: Mapping[str, Any], entry: str) -> None:
    """Raise StoreError unless the reply has what every reply of its kind has: botocore takes one that was cut off
    behind its first line for a good one."""
    if entry not in reply:
        raise StoreError(ErrorKind.PROTOCOL, f"the reply has no {entry}")


def _made(call: _Call, method: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """The reply of one request. Raises StoreError alone, without what botocore has raised: that quotes the reply."""
    _this_thread.call = call
    try:
        call.check()
        return method(**parameters)
    except botocore.exceptions.ClientError as error:
        failed: StoreError = _Refused(error)
    except StoreError as error:
        failed = error.with_traceback(None)
    except _KNOWN as error:
        failed = _failed(error)
    call.drop()
    try:
        raise failed
    finally:
        del failed  # it holds this call


def _read_small(raw: Any, bytes_max: int) -> bytes:
    """The body of a reply that is no page. Raises StoreError if it is longer than `bytes_max` or in malformed
    chunks, and what urllib3 raises."""
    if "transfer-encoding" in raw.headers:
        return _read_chunked(raw, bytes_max)
    body = bytearray()
    while piece := raw.read(min(_PIECE_BYTES, bytes_max + 1 - len(body)), decode_content=False):
        body += piece
        if len(body) > bytes_max:
            raise StoreError(ErrorKind.PROTOCOL, f"a reply of more than {bytes_max} bytes")
    return bytes(body)


def _read_chunked(raw: Any, bytes_max: int) -> bytes:
    # urllib3 reads lines of any length, and http.client reads on to the end for a chunk of -1 bytes.
    stream = raw._fp.fp

    def read(size: int) -> bytes:
        data: bytes = stream.read(size)
        if len(data) < size:
            raise StoreError(ErrorKind.PROTOCOL, "the connection ended within the chunks")
        return data

    return read_chunks(lambda: stream.readline(_LINE_BYTES_MAX), read, bytes_max)


def _length(reply: Mapping[str, Any]) -> int:
    """Bytes of the body of `reply`. Raises StoreError if it does not say."""
    headers = reply["ResponseMetadata"]["HTTPHeaders"]
    if "content-length" not in headers or "transfer-encoding" in headers:
        raise StoreError(ErrorKind.PROTOCOL, "the reply does not say how long the object is")
    return content_length(headers["content-length"])


def _listed(entry: Mapping[str, Any]) -> Listed:
    size: int = entry.get("Size", 0)
    if size < 0:
        raise StoreError(ErrorKind.PROTOCOL, "a size in the listing is below zero")
    try:
        modified_s = entry["LastModified"].timestamp() if "LastModified" in entry else None
    except (ValueError, OverflowError):  # a year that no clock of this machine has
        modified_s = None
    return Listed(entry.get("Key", ""), size, modified_s)


def _without_redirection(context: dict[str, Any], **_: Any) -> None:
    """Have botocore follow no reply to another region, and ask for none: which one is right, the options say."""
    context["s3_redirect"]["redirected"] = True


def _drop(future: concurrent.futures.Future[Any]) -> None:
    """Close what comes after nobody waits for it any more."""
    if not future.cancelled() and future.exception() is None and "Body" in future.result():
        future.result()["Body"].close()


def _failed(error: Exception) -> StoreError:
    if isinstance(error, botocore.exceptions.EndpointConnectionError) and isinstance(
        error.kwargs.get("error"), urllib3.exceptions.NameResolutionError
    ):
        return StoreError(ErrorKind.DNS, "the host has no address")
    kind = next(kind for cls, kind in _BY_EXCEPTION if isinstance(error, cls))
    return StoreError(kind, type(error).__name__)
