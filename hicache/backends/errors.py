"""Why a store could not do what it was asked: one vocabulary for all stores.

A store counts a failure under its kind, in `BackendStatistics.errors` and in the metric that shows them, so an operator
meets the same word whichever the store is. A store of another package may use a kind of its own, as plain text.
"""

from __future__ import annotations

import enum
import socket
import ssl


class ErrorKind(enum.StrEnum):
    """The kind of a failure. The value is the name under which it is counted."""

    DEADLINE = "deadline"  # the caller's time was over
    TIMEOUT = "timeout"  # no byte came or went for too long

    # The connection
    DNS = "dns"
    CONNECTION_REFUSED = "connection_refused"
    CONNECTION_LOST = "connection_lost"
    UNREACHABLE = "unreachable"  # any other error of the network, or no such Unix socket
    TLS = "tls"
    PROTOCOL = "protocol"  # the reply is not one of such a server
    SHORT_BODY = "short_body"  # the reply ended early; the object itself may be whole
    TOO_MANY_CONNECTIONS = "too_many_connections"
    FOREIGN_ADDRESS = "foreign_address"  # a server named a node that the client must not follow it to

    # What the operator has to mend
    WRONG_CREDENTIALS = "wrong_credentials"  # unknown, wrong or expired
    ACCESS_DENIED = "access_denied"
    CLOCK_SKEW = "clock_skew"
    NO_BUCKET = "no_bucket"
    WRONG_REGION = "wrong_region"

    # The state of the server
    THROTTLED = "throttled"  # it asks for fewer requests
    UNAVAILABLE = "unavailable"
    SERVER_ERROR = "server_error"  # any error that it gives no better word for
    LOADING = "loading"
    BUSY = "busy"
    NO_PRIMARY = "no_primary"
    PRIMARY_DOWN = "primary_down"
    CLUSTER_DOWN = "cluster_down"
    NOT_LEADER = "not_leader"
    READ_ONLY = "read_only"
    CANNOT_PERSIST = "cannot_persist"
    TOO_FEW_REPLICAS = "too_few_replicas"
    NO_SPACE = "no_space"
    NO_SEGMENT = "no_segment"  # no node gives memory to the store
    NO_REPLICA = "no_replica"  # no node holds the page any more
    ADMIN = "admin"  # the HTTP server of a Mooncake master, which counts and lists, is not to be used

    # One request or one object
    BAD_REQUEST = "bad_request"  # refused by the server, or by the client before it was sent
    UNSUPPORTED = "unsupported"
    CHECKSUM = "checksum"  # the server says that it received other bytes than were sent
    CONFLICT = "conflict"  # another writer is at the same object
    WRONG_TYPE = "wrong_type"
    MOVED = "moved"
    ASK = "ask"
    NOT_READY = "not_ready"  # the object is being written
    LEASED = "leased"  # the object has a reader, and cannot be removed
    LEASE_EXPIRED = "lease_expired"  # a read took longer than the server held the object for it
    CLIENT_EXPIRED = "client_expired"  # the server has forgotten this client
    TRANSFER = "transfer"  # the node that holds a page did not move it

    # This process
    NO_THREAD = "no_thread"  # this machine cannot start one
    NO_BUFFER = "no_buffer"  # no bounce buffer was free in time
    CLOSED = "closed"
    FORKED = "forked"
    INTERNAL = "internal"  # a bug, or an exception on one of the store's threads, which is in the log


class StoreError(Exception):
    """A store cannot go on with a call. Raised by a `PageStore` in its own verbs, where it ends the call: the pages
    that are not settled yet fail.

    `kind` is counted, also if no page fails with it. `detail` is for messages: it holds nothing that was sent and no
    word that a server has chosen. `retry_after_s` is the pause that the server asked for, 0 for none.
    """

    def __init__(self, kind: str, detail: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)


# The first that fits: the order is from the narrow to the wide.
_OF_EXCEPTIONS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (socket.gaierror, ErrorKind.DNS),
    (ssl.SSLEOFError, ErrorKind.CONNECTION_LOST),
    (ssl.SSLZeroReturnError, ErrorKind.CONNECTION_LOST),
    (ssl.SSLError, ErrorKind.TLS),
    (TimeoutError, ErrorKind.TIMEOUT),
    (BlockingIOError, ErrorKind.TIMEOUT),  # how a socket with a timeout of the kernel's says it
    (ConnectionRefusedError, ErrorKind.CONNECTION_REFUSED),
    (ConnectionError, ErrorKind.CONNECTION_LOST),
)


def kind_of_exception(error: Exception) -> ErrorKind:
    """Return the kind of an exception of a socket, of TLS or of name resolution."""
    return next((kind for cls, kind in _OF_EXCEPTIONS if isinstance(error, cls)), ErrorKind.UNREACHABLE)
