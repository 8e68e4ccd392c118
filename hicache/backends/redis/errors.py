"""Two tables: the error kinds of a Redis server's error replies, and the advice for each kind.

The verbs count a `StoreError` under its kind; constructors turn it into `BackendUnavailable` with the kind's advice.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping

from redis.exceptions import ResponseError

from ...errors import BackendUnavailable
from ..errors import ErrorKind, StoreError, kind_of_exception

# An error reply names the command in quotes near its beginning; only this many bytes are searched.
_SEARCHED_BYTES = 256
_QUOTED = re.compile(rb"['`]([A-Za-z|-]{2,20})['`]")
# By the first word of an error reply.
_REPLIES: Mapping[bytes, ErrorKind] = {
    b"OOM": ErrorKind.NO_SPACE,
    b"READONLY": ErrorKind.READ_ONLY,
    b"MISCONF": ErrorKind.CANNOT_PERSIST,
    b"NOREPLICAS": ErrorKind.TOO_FEW_REPLICAS,
    b"LOADING": ErrorKind.LOADING,
    b"BUSY": ErrorKind.BUSY,
    b"MASTERDOWN": ErrorKind.PRIMARY_DOWN,
    b"CLUSTERDOWN": ErrorKind.CLUSTER_DOWN,
    b"TRYAGAIN": ErrorKind.CLUSTER_DOWN,
    b"MOVED": ErrorKind.MOVED,
    b"ASK": ErrorKind.ASK,
    b"WRONGTYPE": ErrorKind.WRONG_TYPE,
    b"NOAUTH": ErrorKind.WRONG_CREDENTIALS,
    b"DENIED": ErrorKind.WRONG_CREDENTIALS,  # protected mode: a server without a password rejects other machines
    b"WRONGPASS": ErrorKind.WRONG_CREDENTIALS,
    b"NOPERM": ErrorKind.ACCESS_DENIED,
}
# Other codes that messages may show, and the commands that this backend sends.
_OTHER_CODES = frozenset({b"ERR", b"NOPROTO", b"NOSCRIPT", b"CROSSSLOT", b"EXECABORT", b"UNKILLABLE", b"IOERR"})
_COMMANDS = frozenset(
    b"AUTH HELLO SELECT READONLY ASKING CLIENT CLIENT|NO-TOUCH CLUSTER CLUSTER|SLOTS SENTINEL SENTINEL|MASTER "
    b"SENTINEL|REPLICAS GET GETEX SET EXISTS TOUCH PEXPIRE UNLINK EVAL TYPE STRLEN GETRANGE SCAN DBSIZE INFO OBJECT "
    b"OBJECT|IDLETIME".split()
)
ADVICE: Mapping[str, str] = {
    ErrorKind.DEADLINE: "it did not answer in time; check that it is not stopped or overloaded",
    ErrorKind.TIMEOUT: "it did not answer in time; check address, firewall, redis:// against rediss://, and that it is "
    "not stopped or overloaded",
    ErrorKind.CONNECTION_REFUSED: "no server listens at this address; start the server or correct the address",
    ErrorKind.UNREACHABLE: "check the address (of a Unix socket: path and permissions) and the network",
    ErrorKind.DNS: "the host name cannot be resolved; correct it, or check the DNS",
    ErrorKind.TLS: "the TLS handshake failed; check rediss:// against redis://, tls_ca_file, the name in the "
    "certificate, and tls_cert_file, which most servers with TLS require",
    ErrorKind.CERTIFICATE_EXPIRED: "the server's certificate, or the one in tls_cert_file, has expired or is not valid "
    "yet; renew it, or set the clock",
    ErrorKind.CONNECTION_LOST: "it closed the connection; check that it is a Redis server, redis:// against rediss://, "
    "and tls_cert_file, which most servers with TLS require",
    ErrorKind.PROTOCOL: "the reply is not from a Redis server; correct the address",
    ErrorKind.WRONG_CREDENTIALS: "correct `username` and the password in `password_env` or `password_file`, or the "
    "`credential_provider`, or leave them out if the server has no password",
    ErrorKind.ACCESS_DENIED: "its ACL forbids a command or the keys; docs/backends/redis.md lists what HiCache needs",
    ErrorKind.TOO_MANY_CONNECTIONS: "it has as many clients as it allows; raise its maxclients or lower `connections`",
    ErrorKind.LOADING: "it is still reading its data set; wait for it",
    ErrorKind.BUSY: "it runs a long script; wait for the script or stop it with SCRIPT KILL",
    ErrorKind.PRIMARY_DOWN: "it is a replica without its primary; wait for the failover or repair the replication",
    ErrorKind.CLUSTER_DOWN: "the cluster does not serve all slots; check CLUSTER INFO",
    ErrorKind.MOVED: "it is a node of a cluster; name its nodes under `cluster` instead",
    ErrorKind.FOREIGN_ADDRESS: "a server names a node outside `allowed_nodes` or the known cluster; allow that node if "
    "it is yours; otherwise do not trust that server",
    ErrorKind.NO_PRIMARY: "no sentinel knows a primary of that name; check `service` and the sentinels",
    ErrorKind.TOO_LARGE: "it, or a proxy before it, limits the size of values, and pages are larger; raise "
    "proto-max-bulk-len (of a managed server, its own limit), or lower page_size",
    ErrorKind.READ_ONLY: "it is a replica; give the address of the primary, or use `sentinels` or `cluster`",
    ErrorKind.CANNOT_PERSIST: "it rejects writes because it cannot save a snapshot (MISCONF); disable snapshots "
    "(save \"\"), or give its disk room",
    ErrorKind.TOO_FEW_REPLICAS: "it has too few replicas to accept writes; start them, or lower min-replicas-to-write",
    ErrorKind.NO_THREAD: "this machine cannot start a thread; raise the limit on threads of the user or the container",
}
# Why a server rejects pages (OOM).
FULL = (
    "it has reached maxmemory and evicts no pages; set maxmemory-policy allkeys-lru (volatile-* evicts only pages with "
    "a `ttl` or `max_age`), or raise maxmemory"
)
_NO_ADVICE = "check the server's log"
# Error replies whose code does not say enough, by their text, for some after "ERR".
_TEXTS: tuple[tuple[bytes, ErrorKind], ...] = (
    (b"max number of clients", ErrorKind.TOO_MANY_CONNECTIONS),
    (b"invalid password", ErrorKind.WRONG_CREDENTIALS),
    (b"AUTH", ErrorKind.WRONG_CREDENTIALS),
    (b"No such master", ErrorKind.NO_PRIMARY),
    (b"Protocol error: invalid bulk length", ErrorKind.TOO_LARGE),
    (b"CLUSTERDOWN Hash slot not served", ErrorKind.NODE_DOWN),  # of this page; the cluster may work
)


class ErrorReply(ResponseError):
    """An error that the server sent instead of a result. The connection is still usable. Only redis-py raises it, while
    it logs in. As an exception it has no text: a server may repeat the password in it."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.text = text

    @property
    def kind(self) -> ErrorKind:
        """The kind of error."""
        for start, kind in _TEXTS:
            if self.text.removeprefix(b"ERR ").startswith(start):
                return kind
        return _REPLIES.get(self.text.split(b" ", 1)[0], ErrorKind.SERVER_ERROR)

    @property
    def failure(self) -> StoreError:
        """The error as an exception. Its detail is the error's code and the command that the reply names.

        A server may repeat what it received, including passwords and keys. Therefore a word of the reply is shown only
        if it is in a table of this module.
        """
        code = self.text.split(b" ", 1)[0]
        words = [code] if code in _REPLIES or code in _OTHER_CODES else []
        words += [word for word in _QUOTED.findall(self.text[:_SEARCHED_BYTES]) if word.upper() in _COMMANDS][:1]
        return StoreError(self.kind, b" ".join(words).decode())


def failure_of(error: OSError) -> StoreError:
    """Return the StoreError for an exception of a socket."""
    # The text of a TLS error may name the host, which a server may have chosen.
    text = str(getattr(error, "verify_message", error.reason)) if isinstance(error, ssl.SSLError) else str(error)
    return StoreError(kind_of_exception(error), text.partition(",")[0])


def unavailable(failure: StoreError, where: str) -> BackendUnavailable:
    """Return the error that a constructor raises: the address, the failure, and the advice for it."""
    detail = f" ({failure.detail})" if failure.detail else ""
    return BackendUnavailable(f"redis at {where}: {failure.kind}{detail}: {ADVICE.get(failure.kind, _NO_ADVICE)}")
