"""The client that goes through boto3, for what our own does not do: proxies, special endpoints of AWS, its logging.

It costs two to seven times the processor time per byte. A request of botocore cannot be told when to end, so each is
made on a thread of its own that has no frame: the caller waits up to its deadline and leaves it to end by itself, after
`timeout_s` without a byte. A body to be stored is copied for that reason; one that is read is put into its frame by the
caller's own thread, which ends at the deadline.

Locking design: boto3's client and the executor are safe for threads; there is no other state.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import botocore.config
import botocore.exceptions
import urllib3.exceptions

from .access import Access
from .client import Found, Got, Listed, Listing
from .trouble import RequestFailed, Trouble, failed_reply

# About as much as a socket holds.
_PIECE_BYTES = 256 << 10
# Waiting for ever is none of what `Future.result` can do with a number.
_WAIT_MAX_S = 86_400.0
# botocore's exceptions have no common field that says what happened. The first that fits, from the narrow to the wide.
_BY_EXCEPTION: tuple[tuple[type[Exception], Trouble], ...] = (
    (botocore.exceptions.SSLError, Trouble.TLS),
    (botocore.exceptions.ConnectTimeoutError, Trouble.TIMEOUT),
    (botocore.exceptions.ReadTimeoutError, Trouble.TIMEOUT),
    (botocore.exceptions.EndpointConnectionError, Trouble.REFUSED),
    (botocore.exceptions.ProxyConnectionError, Trouble.NETWORK),
    (botocore.exceptions.ConnectionClosedError, Trouble.LOST),
    (botocore.exceptions.IncompleteReadError, Trouble.SHORT_BODY),
    (botocore.exceptions.NoCredentialsError, Trouble.CREDENTIALS),
    (botocore.exceptions.CredentialRetrievalError, Trouble.CREDENTIALS),
    (botocore.exceptions.ResponseStreamingError, Trouble.SHORT_BODY),
    (botocore.exceptions.HTTPClientError, Trouble.LOST),
    (botocore.exceptions.BotoCoreError, Trouble.PROTOCOL),
    (urllib3.exceptions.TimeoutError, Trouble.TIMEOUT),
    (urllib3.exceptions.HTTPError, Trouble.SHORT_BODY),
    (OSError, Trouble.NETWORK),
    (ValueError, Trouble.PROTOCOL),  # a header that should be a number
)


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
        self._timeout_s = options.timeout_s
        self._bucket = options.bucket
        self._client: Any = access.session.create_client(
            "s3",
            region_name=access.region,
            endpoint_url=options.endpoint_url,
            verify=None if options.ca_file is None else str(options.ca_file),
            config=botocore.config.Config(
                connect_timeout=options.connect_timeout_s,
                read_timeout=options.timeout_s,
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
        self._client.meta.events.register("before-send.s3.PutObject", _without_expectation)
        self._threads = concurrent.futures.ThreadPoolExecutor(options.connections, "hicache-s3-boto")

    def _call(self, method: Callable[..., Any], deadline: float, **parameters: Any) -> Mapping[str, Any]:
        """The reply of one request. Raises RequestFailed, of the kind _Refused for replies that are errors."""
        future = self._threads.submit(method, Bucket=self._bucket, **parameters)
        try:
            reply: Mapping[str, Any] = future.result(max(0.0, min(deadline - time.monotonic(), _WAIT_MAX_S)))
            return reply
        except concurrent.futures.TimeoutError as error:
            future.cancel()  # if it has not begun: nobody knows what it would meet by then
            future.add_done_callback(_drop)
            raise RequestFailed(Trouble.TIMEOUT) from error
        except botocore.exceptions.ClientError as error:
            raise _Refused(error) from _forgetful(error)
        except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _failed(error) from _forgetful(error)
    def head(self, name: str, *, deadline: float) -> Found | None:
        """See Client."""
        try:
            reply = self._call(self._client.head_object, deadline, Key=name)
        except _Refused as refused:
            refused.unless(404)
            return None
        _require(reply, "ETag")
        return Found(reply.get("ContentLength", 0), reply["ETag"])

    def get(
        self, name: str, frame: memoryview, fits: Callable[[int], bool], *, deadline: float
    ) -> Got | None:
        """See Client."""
        try:
            reply = self._call(self._client.get_object, deadline, Key=name)
        except _Refused as refused:
            refused.unless(404)
            return None
        with contextlib.closing(reply["Body"]) as body:
            size = _length(reply)
            is_read = fits(size)
            # A head that was cut off within its length looks whole to botocore, but nothing comes after it.
            self._read(body, frame[:size] if is_read else memoryview(bytearray(min(size, 1))), deadline)
            return Got(size, reply.get("ETag", ""), is_read)

    def _read(self, body: Any, target: memoryview, deadline: float) -> None:
        # botocore's own ways to read wait until all has come, each time anew for as long as a byte may take.
        stream, done = body._raw_stream, 0
        try:
            while done < target.nbytes:
                left = min(self._timeout_s, deadline - time.monotonic())
                if left <= 0:
                    raise RequestFailed(Trouble.TIMEOUT)
                body.set_socket_timeout(left)
                piece = stream.read1(min(target.nbytes - done, _PIECE_BYTES))
                if not piece:
                    raise RequestFailed(Trouble.SHORT_BODY, f"{done} of {target.nbytes} bytes came")
                target[done : done + len(piece)] = piece
                done += len(piece)
        except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
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
            data = bytearray(min(_length(reply), bytes_max))
            self._read(body, memoryview(data), deadline)
        return bytes(data)

    def put(self, name: str, body: memoryview, *, if_absent: bool, deadline: float) -> bool:
        """See Client."""
        # Without a type, SeaweedFS stores an empty object when the connection ends before the body's first byte.
        more = {"ContentType": "application/octet-stream", **({"IfNoneMatch": "*"} if if_absent else {})}
        try:
            reply = self._call(self._client.put_object, deadline, Key=name, Body=bytes(body), **more)
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

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[Trouble]:
        """See Client."""
        chosen = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        reply = self._call(self._client.delete_objects, deadline, Delete=chosen)
        return [failed_reply(400, error.get("Code", "")).trouble for error in reply.get("Errors", ())]

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """See Client."""
        more = {} if token is None else {"ContinuationToken": token}
        reply = self._call(self._client.list_objects_v2, deadline, Prefix=prefix, MaxKeys=keys_max, **more)
        _require(reply, "IsTruncated")
        return Listing(
            [_listed(entry) for entry in reply.get("Contents", ())],
            reply.get("NextContinuationToken") if reply.get("IsTruncated") else None,
        )

    def close(self) -> None:
        """See Client. Waits for requests that were left to end by themselves."""
        self._threads.shutdown()
        self._client.close()


class _Refused(RequestFailed):
    """A reply that is an error."""

    def __init__(self, error: botocore.exceptions.ClientError) -> None:
        about, code = error.response.get("ResponseMetadata", {}), error.response.get("Error", {}).get("Code", "")
        self.status: int = about.get("HTTPStatusCode", 0)
        self.code: str = code
        known = failed_reply(self.status, code, about.get("HTTPHeaders", {}).get("retry-after", ""))
        super().__init__(known.trouble, str(known), retry_after_s=known.retry_after_s)

    def unless(self, *statuses: int) -> None:
        """Raise it, unless it has one of these statuses and is about the object."""
        if self.status not in statuses or self.code == "NoSuchBucket":
            raise self


def _require(reply: Mapping[str, Any], entry: str) -> None:
    """Raise RequestFailed unless the reply has what every reply of its kind has: botocore takes one that was cut off
    behind its first line for a good one."""
    if entry not in reply:
        raise RequestFailed(Trouble.PROTOCOL, f"the reply has no {entry}")


def _forgetful(error: Exception) -> Exception:
    """`error` without the calls that it went through. botocore's exceptions refer to themselves, so that with them the
    frames of those calls would be held until the next garbage collection."""
    return error.with_traceback(None)


def _length(reply: Mapping[str, Any]) -> int:
    """Bytes of the body of `reply`. Raises RequestFailed if it does not say."""
    _require(reply, "ContentLength")
    size: int = reply["ContentLength"]
    return size


def _listed(entry: Mapping[str, Any]) -> Listed:
    modified = entry.get("LastModified")
    return Listed(entry.get("Key", ""), entry.get("Size", 0), None if modified is None else modified.timestamp())


def _without_expectation(request: Any, **_: Any) -> None:
    """Send a body without being asked to. It costs a round trip less, and botocore reads for ever where a connection
    ends within the reply that asks for the body."""
    request.headers.pop("Expect", None)


def _drop(future: concurrent.futures.Future[Any]) -> None:
    """Close what comes after nobody waits for it any more."""
    if not future.cancelled() and future.exception() is None and "Body" in future.result():
        future.result()["Body"].close()


def _failed(
    error: botocore.exceptions.BotoCoreError | urllib3.exceptions.HTTPError | OSError | ValueError,
) -> RequestFailed:
    if isinstance(error, botocore.exceptions.EndpointConnectionError) and isinstance(
        error.kwargs.get("error"), urllib3.exceptions.NameResolutionError
    ):
        return RequestFailed(Trouble.DNS, "the host has no address")
    trouble = next(trouble for kind, trouble in _BY_EXCEPTION if isinstance(error, kind))
    return RequestFailed(trouble, type(error).__name__)
