"""The kinds of failures: one vocabulary for all stores.

A store counts a failure under its kind, in `BackendStatistics.errors` and in the metric, so operators see the same word
for all stores. A store of another package may use its own kind, as plain text.
"""

from __future__ import annotations

import enum
import re
import socket
import ssl


class ErrorKind(enum.StrEnum):
    """The kind of a failure. The value is its name in counts."""

    DEADLINE = "deadline"  # the caller's time was over
    TIMEOUT = "timeout"  # no byte was sent or received for too long

    # The connection
    DNS = "dns"
    CONNECTION_REFUSED = "connection_refused"
    CONNECTION_LOST = "connection_lost"
    UNREACHABLE = "unreachable"  # any other error of the network, or no such Unix socket
    TLS = "tls"
    CERTIFICATE_EXPIRED = "certificate_expired"  # or not valid yet; that of the server or of this client
    PROTOCOL = "protocol"  # the reply is not valid in the protocol of the store
    SHORT_BODY = "short_body"  # the reply ended early; the object itself may be whole
    TOO_MANY_CONNECTIONS = "too_many_connections"
    FOREIGN_ADDRESS = "foreign_address"  # a server reported a node that is not allowed

    # To be fixed by the operator
    WRONG_CREDENTIALS = "wrong_credentials"  # unknown, wrong or expired
    ACCESS_DENIED = "access_denied"
    CLOCK_SKEW = "clock_skew"
    NO_BUCKET = "no_bucket"
    WRONG_REGION = "wrong_region"

    # The state of the server
    THROTTLED = "throttled"  # it requests fewer requests
    UNAVAILABLE = "unavailable"
    SERVER_ERROR = "server_error"  # any other error of the server
    LOADING = "loading"
    BUSY = "busy"
    NO_PRIMARY = "no_primary"
    PRIMARY_DOWN = "primary_down"
    CLUSTER_DOWN = "cluster_down"
    NODE_DOWN = "node_down"  # the node with this page does not answer or is missing; other nodes work
    NOT_LEADER = "not_leader"
    READ_ONLY = "read_only"
    CANNOT_PERSIST = "cannot_persist"
    TOO_FEW_REPLICAS = "too_few_replicas"
    NO_SPACE = "no_space"
    NO_SEGMENT = "no_segment"  # no node provides memory to the store
    NO_REPLICA = "no_replica"  # no node has the page any longer
    ADMIN = "admin"  # the HTTP server of a Mooncake master, which counts and lists, is not usable

    # One request or one object
    TOO_LARGE = "too_large"  # the server, or a proxy before it, limits the size of values
    BAD_REQUEST = "bad_request"  # rejected by the server, or by the client before sending
    UNSUPPORTED = "unsupported"
    CHECKSUM = "checksum"  # the server reports that it received different bytes
    CONFLICT = "conflict"  # another writer is writing the same object
    WRONG_TYPE = "wrong_type"
    MOVED = "moved"
    ASK = "ask"
    NOT_READY = "not_ready"  # the object is being written
    LEASED = "leased"  # the object is being read, and cannot be removed
    LEASE_EXPIRED = "lease_expired"  # a read took longer than the server's lease
    CLIENT_EXPIRED = "client_expired"  # the server has forgotten this client
    TRANSFER = "transfer"  # the node with a page did not transfer it

    # This process
    NO_THREAD = "no_thread"  # this machine cannot start a thread
    NO_BUFFER = "no_buffer"  # no bounce buffer was free in time
    HANGS = "hangs"  # the calls of all threads of the store hang
    CLOSED = "closed"
    FORKED = "forked"
    INTERNAL = "internal"  # a bug, or an exception on one of the store's threads, which is in the log


# Before the name of an exception of a driver, in the kind of an error.
RAISED = "raised_"


class StoreError(Exception):
    """A store cannot continue a call. A driver raises it, which ends the call: the remaining pages fail.

    `kind` is counted, even if no page fails with it. `detail` is for messages; it contains neither sent data nor text
    from a server, except the words of a daemon (`remote/client.py`). `retry_after_s` is the pause that the server
    requested, or 0. `explanation` is the message for an operator, with what to do; empty for a general one.
    """

    def __init__(self, kind: str, detail: str = "", retry_after_s: float = 0.0, explanation: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.explanation = explanation

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)


# What OpenSSL says of a certificate outside its dates, here or in the alert of the peer.
_EXPIRED = re.compile("certificate.(has.)?(expired|is not yet valid)", re.IGNORECASE)
# The first match counts: the order is from specific to general.
_OF_EXCEPTIONS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (socket.gaierror, ErrorKind.DNS),
    (ssl.SSLEOFError, ErrorKind.CONNECTION_LOST),
    (ssl.SSLZeroReturnError, ErrorKind.CONNECTION_LOST),
    (ssl.SSLError, ErrorKind.TLS),
    (TimeoutError, ErrorKind.TIMEOUT),
    (BlockingIOError, ErrorKind.TIMEOUT),  # raised by a socket with a timeout in the kernel
    (ConnectionRefusedError, ErrorKind.CONNECTION_REFUSED),
    (ConnectionError, ErrorKind.CONNECTION_LOST),
)


def kind_of_exception(error: Exception) -> ErrorKind:
    """Return the kind of an exception of a socket, of TLS or of name resolution."""
    if isinstance(error, ssl.SSLError) and _EXPIRED.search(str(error)):
        return ErrorKind.CERTIFICATE_EXPIRED
    return next((kind for cls, kind in _OF_EXCEPTIONS if isinstance(error, cls)), ErrorKind.UNREACHABLE)


def words_of_exception(error: OSError) -> str:
    """Return the reason that such an exception gives, without numbers and lines of source code."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if kind_of_exception(error) is ErrorKind.TIMEOUT:
        return "no answer in time"
    return error.strerror or type(error).__name__
