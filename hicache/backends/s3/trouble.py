"""What can go wrong with a request to S3, as classes that are counted; the one table of status codes and exceptions."""

from __future__ import annotations

import enum
import socket
import ssl
from collections.abc import Mapping

from ..errors import StoreError


class Trouble(enum.StrEnum):
    """The class under which a failed request is counted in `BackendStatistics.errors`."""

    DEADLINE = "deadline"  # not started in time
    TIMEOUT = "timeout"  # no byte came, or none was taken, for too long
    DNS = "dns"
    REFUSED = "connection_refused"
    LOST = "connection_lost"
    NETWORK = "network"
    TLS = "tls"
    PROTOCOL = "protocol"  # the reply is not one of an S3 store
    SHORT_BODY = "short_body"  # the reply ended early; the object itself may be whole
    SLOW_DOWN = "slow_down"
    SERVER = "server_error"
    UNAVAILABLE = "unavailable"
    ACCESS_DENIED = "access_denied"
    CREDENTIALS = "credentials"  # unknown, wrong or expired
    CLOCK_SKEW = "clock_skew"
    NO_BUCKET = "no_bucket"
    WRONG_REGION = "wrong_region"
    CHECKSUM = "checksum"  # the server says that it received other bytes than were sent
    CONFLICT = "conflict"  # another writer is at the same object
    FULL = "full"
    UNSUPPORTED = "unsupported"
    REFUSED_REQUEST = "bad_request"  # by the server, or by us: it would hold a character that HTTP forbids


class RequestFailed(StoreError):
    """A request got no usable answer. `retry_after_s` is the pause that the server asked for, 0 for none."""

    def __init__(self, trouble: Trouble, detail: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(trouble, detail, retry_after_s)
        self.trouble = trouble


# A server may ask for any time; what is asked for beyond this is not believed.
_RETRY_AFTER_MAX_S = 60.0
# Codes in the body of an error say more than its status. From the list of error codes in the S3 API reference, and
# what servers other than AWS use. Messages name these codes only: a server can send what it was sent in place of one.
_BY_CODE: Mapping[str, Trouble] = {
    "SlowDown": Trouble.SLOW_DOWN,
    "Throttling": Trouble.SLOW_DOWN,
    "ThrottlingException": Trouble.SLOW_DOWN,
    "RequestLimitExceeded": Trouble.SLOW_DOWN,
    "TooManyRequests": Trouble.SLOW_DOWN,
    "ServiceUnavailable": Trouble.UNAVAILABLE,
    "InternalError": Trouble.SERVER,
    "RequestTimeout": Trouble.TIMEOUT,
    "AccessDenied": Trouble.ACCESS_DENIED,
    "InvalidAccessKeyId": Trouble.CREDENTIALS,
    "SignatureDoesNotMatch": Trouble.CREDENTIALS,
    "ExpiredToken": Trouble.CREDENTIALS,
    "InvalidToken": Trouble.CREDENTIALS,
    "TokenRefreshRequired": Trouble.CREDENTIALS,
    "RequestTimeTooSkewed": Trouble.CLOCK_SKEW,
    "NoSuchBucket": Trouble.NO_BUCKET,
    "PermanentRedirect": Trouble.WRONG_REGION,
    "TemporaryRedirect": Trouble.WRONG_REGION,
    "AuthorizationHeaderMalformed": Trouble.WRONG_REGION,
    "BadDigest": Trouble.CHECKSUM,
    "XAmzContentSHA256Mismatch": Trouble.CHECKSUM,
    "XAmzContentChecksumMismatch": Trouble.CHECKSUM,
    "ConditionalRequestConflict": Trouble.CONFLICT,
    "OperationAborted": Trouble.CONFLICT,
    "QuotaExceeded": Trouble.FULL,
    "InsufficientStorage": Trouble.FULL,
    "XMinioStorageFull": Trouble.FULL,
    "NotImplemented": Trouble.UNSUPPORTED,
    "InvalidArgument": Trouble.REFUSED_REQUEST,
    "InvalidBucketName": Trouble.REFUSED_REQUEST,
    "InvalidRequest": Trouble.REFUSED_REQUEST,
    "MalformedXML": Trouble.REFUSED_REQUEST,
    "MethodNotAllowed": Trouble.REFUSED_REQUEST,
    "MissingContentLength": Trouble.REFUSED_REQUEST,
}
_BY_STATUS: Mapping[int, Trouble] = {
    301: Trouble.WRONG_REGION,
    307: Trouble.WRONG_REGION,
    401: Trouble.CREDENTIALS,
    403: Trouble.ACCESS_DENIED,
    408: Trouble.TIMEOUT,
    409: Trouble.CONFLICT,
    429: Trouble.SLOW_DOWN,
    500: Trouble.SERVER,
    501: Trouble.UNSUPPORTED,
    502: Trouble.UNAVAILABLE,
    503: Trouble.UNAVAILABLE,
    504: Trouble.UNAVAILABLE,
    507: Trouble.FULL,
}
# The first that fits: the order is from the narrow to the wide.
_BY_EXCEPTION: tuple[tuple[type[Exception], Trouble], ...] = (
    (socket.gaierror, Trouble.DNS),
    (ssl.SSLEOFError, Trouble.LOST),
    (ssl.SSLZeroReturnError, Trouble.LOST),
    (ssl.SSLError, Trouble.TLS),
    (TimeoutError, Trouble.TIMEOUT),
    (BlockingIOError, Trouble.TIMEOUT),
    (ConnectionRefusedError, Trouble.REFUSED),
    (ConnectionError, Trouble.LOST),
    (OSError, Trouble.NETWORK),
)


def trouble_of_status(status: int, code: str) -> Trouble:
    """The class of an error reply."""
    found = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if found is not None:
        return found
    if status >= 500:
        return Trouble.SERVER
    return Trouble.REFUSED_REQUEST if status >= 400 else Trouble.PROTOCOL


def failed_reply(status: int, code: str, retry_after: str = "") -> RequestFailed:
    """What an error reply means; `retry_after` is its header of that name. Dates in it are not understood."""
    seconds = min(float(retry_after), _RETRY_AFTER_MAX_S) if retry_after.isascii() and retry_after.isdigit() else 0.0
    detail = f"status {status} {code if code in _BY_CODE else ''}".rstrip()
    return RequestFailed(trouble_of_status(status, code), detail, retry_after_s=seconds)


def trouble_of_exception(error: Exception) -> Trouble:
    """The class of an exception of a socket, of TLS or of name resolution."""
    for kind, trouble in _BY_EXCEPTION:
        if isinstance(error, kind):
            return trouble
    return Trouble.NETWORK
