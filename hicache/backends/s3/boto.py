"""The client based on boto3: for S3 Express, proxies with a password, and stores on which the direct client fails.

botocore chooses the endpoint, opens the sessions of directory buckets and signs. urllib3 (which botocore uses too)
sends. This module reads the replies, within the same limits as the direct client. botocore would read them whole; it
sees only the reply to CreateSession.

Locking design: boto3's client, urllib3's pools and the executor are thread-safe. Name resolution, credential requests
and the reading of heads accept no deadline. Therefore a thread of the executor makes each request and fills its
`_Reply`, which the caller reads after that thread is done. The thread never has a page's buffer: a page to store is
copied, and a loaded page is read by the caller. At the deadline, the caller shuts down the socket that the thread
reads. `_Reply.sock` is set before the deadline is checked, so either the caller finds the socket or the thread sees
that it is late.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import botocore.awsrequest
import botocore.config
import botocore.credentials
import botocore.exceptions
import botocore.httpsession
import botocore.parsers
import botocore.response
import botocore.utils
import urllib3
import urllib3.connection

from ...frame import TagStream, fill
from ..errors import ErrorKind, StoreError, kind_of_exception, words_of_exception
from ..http import Head, read_chunks
from ..rotated import Rotated
from .access import Access, config_errors, open_session
from .client import ObjectInfo, Target, object_length
from .replies import ERROR_BYTES_MAX, LISTING_BYTES_MAX, Listing, error_code, failed_reply, read_listing, read_removals
from .signing import Credentials
from .throttle import Throttle

# About as much as a socket holds.
_PIECE_BYTES = 256 << 10
# A longer line between the chunks of a body is cut, and then rejected.
_LINE_BYTES_MAX = 4096
# `Future.result` does not accept an infinite timeout.
_WAIT_MAX_S = 86_400.0
# The last four are botocore's errors for a session with missing or malformed fields.
_KNOWN = (
    OSError, http.client.HTTPException, urllib3.exceptions.HTTPError, botocore.exceptions.BotoCoreError,
    botocore.parsers.ResponseParserError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
# The first match counts. A socket error inside takes precedence; all other errors are PROTOCOL.
_KINDS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (http.client.IncompleteRead, ErrorKind.SHORT_BODY),  # also the base class of urllib3's
    (urllib3.exceptions.TimeoutError, ErrorKind.TIMEOUT),
    (botocore.exceptions.NoCredentialsError, ErrorKind.WRONG_CREDENTIALS),
    (botocore.exceptions.CredentialRetrievalError, ErrorKind.WRONG_CREDENTIALS),
    (botocore.exceptions.BotoCoreError, ErrorKind.BAD_REQUEST),  # raised before anything is sent
)
_this_thread = threading.local()


class _Reply:
    """The reply to a request that must end at `deadline`. `body` is the whole body, unless `stream` has a page."""

    def __init__(self, timeout_s: float, deadline: float) -> None:
        self.head, self.body = Head(0, {}), b""
        self.stream: urllib3.BaseHTTPResponse = urllib3.HTTPResponse()
        self.sock: socket.socket | None = None
        self._timeout_s, self._deadline = timeout_s, deadline

    def time_left(self) -> float:
        """Return the seconds that the next byte may take. Raises TimeoutError after the deadline."""
        left = min(self._timeout_s, self._deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError
        return left

    def read_into(self, target: Sequence[memoryview], arrived: TagStream | None = None) -> None:
        """Read the next bytes of a page. Raises StoreError."""
        done, size = 0, sum(buffer.nbytes for buffer in target)
        try:
            while done < size:
                botocore.response.StreamingBody(self.stream, None).set_socket_timeout(self.time_left())
                piece = memoryview(self.stream.read1(min(size - done, _PIECE_BYTES), decode_content=False))
                if arrived is not None:
                    arrived.add(piece)
                target = fill(target, piece)
                done += len(piece)
        except _KNOWN as error:
            raise _failed(error) from None

    def end(self) -> None:
        """Shut down the connection under the thread that reads the head. REQUIRES: the deadline has passed."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                # Not the TLS class's method: the TLS state belongs to the reading thread.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, unless the reply was read to its end."""
        self.stream.close()
        self.stream.release_conn()


class _Endable:
    sock: socket.socket

    def getresponse(self) -> Any:
        """See http.client.HTTPConnection."""
        _this_thread.reply.sock = self.sock
        _this_thread.reply.time_left()
        return super().getresponse()  # type: ignore[misc]


class _Connection(_Endable, urllib3.connection.HTTPConnection):
    pass


class _TlsConnection(_Endable, urllib3.connection.HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class BotoClient:
    """The verbs of S3Client; see there. The constructor raises ConfigError if boto3 rejects its configuration."""

    def __init__(self, access: Access) -> None:
        options = access.options
        self._access = access
        self._options = options
        self.throttle = Throttle(options.connections)
        s3 = {"addressing_style": "path" if access.is_path_style else "virtual", "payload_signing_enabled": False}
        with config_errors("boto3 does not accept its configuration or that of the proxy"):
            self._tls = None if access.server.tls is None else access.server.tls.get()
            self._pools = _open_pools(access)
            session = access.session
            if isinstance(access.credentials, Rotated):
                session = open_session(options)
                session.register_component("credential_provider", _CurrentCredentials(access.credentials))
            self._client: Any = session.create_client(
                "s3", region_name=access.region, endpoint_url=options.endpoint_url,
                config=botocore.config.Config(
                    retries={"total_max_attempts": 1}, request_checksum_calculation="when_required", s3=s3
                ),
            )  # fmt: skip
        self._client.meta.events.register("before-send.s3", self._send)
        self._client.meta.events.register_last("before-parameter-build.s3", _as_asked)
        self._threads = concurrent.futures.ThreadPoolExecutor(options.connections, "hicache-s3-boto")

    def head(self, name: str, *, deadline: float) -> ObjectInfo | None:
        """See S3Client."""
        with self._reply("head_object", (200, 404), deadline, Key=name) as reply:
            return None if reply.head.status == 404 else ObjectInfo(reply.head.length or 0, _etag(reply.head))

    def get(
        self, name: str, target: Target, arrived: TagStream | None = None, *, deadline: float
    ) -> ObjectInfo | None:
        """See S3Client."""
        with self._reply("get_object", (200, 404), deadline, Key=name) as reply:
            if reply.head.status == 404:
                return None
            size = object_length(reply.head)
            # http.client accepts a head that was cut within its Content-Length; reading a byte of the body detects it.
            reply.read_into(target(size) or [memoryview(bytearray(min(size, 1)))], arrived)
            return ObjectInfo(size, reply.head.headers.get("etag", ""))

    def get_start(self, name: str, bytes_max: int, *, deadline: float) -> bytes | None:
        """See S3Client."""
        asked = {"Key": name, "Range": f"bytes=0-{bytes_max - 1}"}
        with self._reply("get_object", (200, 206, 404, 416), deadline, **asked) as reply:
            if reply.head.status in (404, 416):  # an empty object has no first byte
                return None if reply.head.status == 404 else b""
            size, data = min(object_length(reply.head), bytes_max), bytearray()
            while len(data) < size:  # memory grows only with the bytes that arrive
                piece = bytearray(min(size - len(data), _PIECE_BYTES))
                reply.read_into([memoryview(piece)])
                data += piece
            return bytes(data)

    def put(self, name: str, body: Sequence[memoryview], *, if_absent: bool, deadline: float) -> bool:
        """See S3Client."""
        expected, condition = ((200, 412), {"IfNoneMatch": "*"}) if if_absent else ((200,), {})
        # Without a type, SeaweedFS stores an empty object when the connection ends before the body's first byte.
        asked = {"Key": name, "Body": b"".join(body), "ContentType": "application/octet-stream", **condition}
        with self._reply("put_object", expected, deadline, **asked) as reply:
            return reply.head.status == 200 and bool(_etag(reply.head))

    def remove(self, name: str, etag: str, *, deadline: float) -> None:
        """See S3Client."""
        asked = {"Key": name, "IfMatch": etag} if etag else {"Key": name}
        with self._reply("delete_object", (200, 202, 204, 404, 409, 412), deadline, **asked):
            pass

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """See S3Client."""
        chosen = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        with self._reply("delete_objects", (200,), deadline, Delete=chosen) as reply:
            return read_removals(reply.body)

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """See S3Client."""
        more = {} if token is None else {"ContinuationToken": token}
        with self._reply("list_objects_v2", (200,), deadline, Prefix=prefix, MaxKeys=keys_max, **more) as reply:
            return read_listing(reply.body)

    def close(self) -> None:
        """See S3Client. Waits for abandoned requests."""
        self._threads.shutdown()
        self._pools.clear()
        self._client.close()

    @contextlib.contextmanager
    def _reply(self, verb: str, expected: Sequence[int], deadline: float, **asked: Any) -> Iterator[_Reply]:
        """Make a request once. Raises StoreError if no reply comes or its status is not in `expected`."""
        with self.throttle.turn(deadline):
            reply = self._access.authorized(lambda _: self._fetch(verb, expected, deadline, asked), deadline)
            try:
                yield reply
            finally:
                reply.close()

    def _fetch(self, verb: str, expected: Sequence[int], deadline: float, asked: dict[str, Any]) -> _Reply:
        reply = _Reply(self._options.timeout, deadline)
        future = self._threads.submit(self._make, reply, verb, asked)
        try:
            failure = future.result(max(0.0, min(deadline - time.monotonic(), _WAIT_MAX_S)))
        except TimeoutError:
            if not future.cancel():
                reply.end()
            future.add_done_callback(lambda _: reply.close())
            raise StoreError(ErrorKind.TIMEOUT) from None
        with contextlib.ExitStack() as undo:
            undo.callback(reply.close)
            if failure is not None:  # a new exception: the thread keeps the old one, which would keep pages alive
                raise StoreError(failure.kind, failure.detail, failure.retry_after_s)
            status, code = reply.head.status, error_code(reply.body) if reply.head.status >= 300 else ""
            if status not in expected or code == "NoSuchBucket":
                raise failed_reply(status, code, reply.head.headers.get("retry-after", ""))
            undo.pop_all()
        return reply

    def _make(self, reply: _Reply, verb: str, asked: dict[str, Any]) -> StoreError | None:
        """Fill `reply`, on a thread of the executor. Return the failure, if any."""
        _this_thread.reply = reply
        try:
            reply.time_left()
            getattr(self._client, verb)(Bucket=self._options.bucket, **asked)
        except StoreError as error:
            return error
        except _KNOWN as error:
            return _failed(error)
        return None

    def _send(self, request: Any, event_name: str, **_: Any) -> Any:
        """Send a request for botocore, but keep the reply from it. Raises StoreError, and urllib3's exceptions."""
        reply: _Reply = _this_thread.reply
        request.headers.pop("Expect", None)  # send the body without waiting for "100 Continue": saves a round trip
        left = reply.time_left()
        tls = self._access.server.tls
        if tls is not None and tls.get() is not self._tls:  # ca_file has changed
            self._tls, self._pools = tls.get(), _open_pools(self._access)
        reply.stream = stream = self._pools.urlopen(
            request.method, request.url, body=request.body, headers=dict(request.headers.items()),
            redirect=False, retries=False, preload_content=False, decode_content=False,
            timeout=urllib3.Timeout(connect=min(self._options.connect_timeout, left), read=left),
        )  # fmt: skip
        reply.head = Head(stream.status, {name.lower(): value for name, value in stream.headers.items()})
        if stream.status not in (200, 206) or not event_name.endswith(".GetObject"):
            reply.body = _read_small(stream, LISTING_BYTES_MAX if stream.status == 200 else ERROR_BYTES_MAX)
        seen = b""
        if event_name.endswith(".CreateSession"):
            if stream.status != 200 or error_code(reply.body):
                raise failed_reply(stream.status, error_code(reply.body))
            seen = reply.body
        raw = urllib3.HTTPResponse(io.BytesIO(seen), preload_content=False)
        return botocore.awsrequest.AWSResponse(request.url, 200, {}, raw)


class _CurrentCredentials:
    """Credentials as botocore signs with them, and their own provider: `credentials` as they are now."""

    def __init__(self, credentials: Rotated[Credentials]) -> None:
        self._credentials = credentials

    def load_credentials(self) -> Self:
        """See botocore.credentials.CredentialResolver."""
        return self

    def get_frozen_credentials(self) -> botocore.credentials.ReadOnlyCredentials:
        """See botocore.credentials.Credentials."""
        now = self._credentials.get()
        return botocore.credentials.ReadOnlyCredentials(now.access_key, now.secret_key, now.session_token)

    def get_deferred_property(self, _name: str) -> Callable[[], None]:
        """See botocore.credentials.Credentials. The only one is the number of the account, which is not known."""
        return lambda: None


def _open_pools(access: Access) -> urllib3.PoolManager:
    """Return pools of connections, through the proxy of the options or of the environment, which may have a password.
    """
    url, proxy = f"{'http' if access.server.tls is None else 'https'}://{access.host}", access.options.proxy
    known = {"http": proxy, "https": proxy} if proxy else botocore.utils.get_environ_proxies(url)
    proxies = botocore.httpsession.ProxyConfiguration(known)
    tls = None if access.server.tls is None else access.server.tls.get()
    settings: Any = {"maxsize": access.options.connections, "ssl_context": tls, "blocksize": _PIECE_BYTES}
    proxy = proxies.proxy_url_for(url)
    pools = urllib3.PoolManager(**settings)
    if proxy:
        pools = urllib3.ProxyManager(proxy, proxy_headers=proxies.proxy_headers_for(proxy), **settings)
    pools.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pools


def _as_asked(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Make botocore ignore redirections to another region, and list names without an encoding."""
    context.setdefault("s3_redirect", {})["redirected"] = True
    params.pop("EncodingType", None)


def _failed(error: Exception) -> StoreError:
    while isinstance(error, urllib3.exceptions.HTTPError):
        inner = next((one for one in (*error.args, error.__cause__) if isinstance(one, Exception)), None)
        if inner is None:
            break
        error = inner
    if isinstance(error, OSError):
        return StoreError(kind_of_exception(error), words_of_exception(error))
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), ErrorKind.PROTOCOL)
    return StoreError(kind, type(error).__name__)


def _read_small(stream: Any, bytes_max: int) -> bytes:
    """Return the body of a reply that is not a page. Raises StoreError if it is longer than `bytes_max`."""
    if "transfer-encoding" in stream.headers:
        # http.client would accept a chunk of -1 bytes as the rest of the connection, and endless trailers.
        reader = stream._fp.fp
        found = read_chunks(lambda: reader.readline(_LINE_BYTES_MAX), reader.read, bytes_max)
        stream._fp.close()
        stream.release_conn()
        return found
    body = bytearray()
    while piece := stream.read(min(_PIECE_BYTES, bytes_max + 1 - len(body)), decode_content=False):
        body += piece
        if len(body) > bytes_max:
            raise StoreError(ErrorKind.PROTOCOL, f"a reply of more than {bytes_max} bytes")
    return bytes(body)


def _etag(head: Head) -> str:
    """Return the ETag. Raises StoreError if it is missing: http.client accepts a head that was cut."""
    if "etag" not in head.headers:
        raise StoreError(ErrorKind.PROTOCOL, "the reply has no ETag")
    return head.headers["etag"]
