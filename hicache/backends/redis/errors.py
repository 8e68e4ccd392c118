"""What can go wrong with a Redis server, in one table: error replies and exceptions of sockets.

Inside this package trouble travels as a `Trouble`, which carries a `Fault`: the verbs count it under the fault's name,
constructors turn it into `BackendUnavailable` with the fault's advice.
"""

from __future__ import annotations

import enum
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import BackendUnavailable
from ..pages import StoreError

# The command that an error reply names in quotes stands near its beginning.
_SEARCHED_BYTES = 256
_QUOTED = re.compile(rb"['`]([A-Za-z|-]{2,20})['`]")


class Fault(enum.StrEnum):
    """A class of trouble; the name under which it is counted."""

    DEADLINE = "deadline"  # the caller's time was over
    TIMEOUT = "timeout"  # not a byte came or went for `timeout_s`
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    DNS = "dns"
    TLS = "tls"
    LOST = "connection_lost"
    PROTOCOL = "protocol"
    CREDENTIALS = "wrong_credentials"
    PERMISSION = "no_permission"
    CONNECTIONS = "too_many_connections"
    OUT_OF_MEMORY = "out_of_memory"
    READ_ONLY = "read_only"
    CANNOT_PERSIST = "cannot_persist"
    TOO_FEW_REPLICAS = "too_few_replicas"
    LOADING = "loading"
    BUSY = "busy"
    PRIMARY_DOWN = "primary_down"
    CLUSTER_DOWN = "cluster_down"
    MOVED = "moved"
    ASK = "ask"
    FOREIGN = "foreign_address"  # a server named a node that we must not follow it to
    NO_PRIMARY = "no_primary"
    NO_THREAD = "no_thread"  # this machine cannot start one, and connections are opened in threads
    WRONG_TYPE = "wrong_type"
    REPLY = "error_reply"


# Of an error reply the first word counts.
_REPLIES: Mapping[bytes, Fault] = {
    b"OOM": Fault.OUT_OF_MEMORY,
    b"READONLY": Fault.READ_ONLY,
    b"MISCONF": Fault.CANNOT_PERSIST,
    b"NOREPLICAS": Fault.TOO_FEW_REPLICAS,
    b"LOADING": Fault.LOADING,
    b"BUSY": Fault.BUSY,
    b"MASTERDOWN": Fault.PRIMARY_DOWN,
    b"CLUSTERDOWN": Fault.CLUSTER_DOWN,
    b"TRYAGAIN": Fault.CLUSTER_DOWN,
    b"MOVED": Fault.MOVED,
    b"ASK": Fault.ASK,
    b"WRONGTYPE": Fault.WRONG_TYPE,
    b"NOAUTH": Fault.CREDENTIALS,
    b"DENIED": Fault.CREDENTIALS,  # a server without a password, to anyone from another machine
    b"WRONGPASS": Fault.CREDENTIALS,
    b"NOPERM": Fault.PERMISSION,
}
# Other codes that messages show, and the commands that we send.
_OTHER_CODES = frozenset({b"ERR", b"NOPROTO", b"NOSCRIPT", b"CROSSSLOT", b"EXECABORT", b"UNKILLABLE", b"IOERR"})
_COMMANDS = frozenset(
    b"AUTH HELLO SELECT READONLY ASKING CLIENT CLIENT|NO-TOUCH CLUSTER CLUSTER|SLOTS SENTINEL SENTINEL|MASTER "
    b"SENTINEL|REPLICAS GET GETEX SET EXISTS TOUCH PEXPIRE UNLINK EVAL TYPE STRLEN GETRANGE SCAN DBSIZE INFO OBJECT "
    b"OBJECT|IDLETIME".split()
)
# Exceptions of the standard library, the special ones first.
_EXCEPTIONS: tuple[tuple[type[BaseException], Fault], ...] = (
    (socket.gaierror, Fault.DNS),
    (ssl.SSLError, Fault.TLS),
    (TimeoutError, Fault.TIMEOUT),
    (BlockingIOError, Fault.TIMEOUT),  # how a socket with a timeout of the kernel's says it
    (ConnectionRefusedError, Fault.REFUSED),
    (FileNotFoundError, Fault.UNREACHABLE),  # no such Unix socket
    (PermissionError, Fault.UNREACHABLE),
    (ConnectionError, Fault.LOST),
    (OSError, Fault.UNREACHABLE),
)
_ADVICE: Mapping[Fault, str] = {
    Fault.DEADLINE: "it did not answer in time; check that it is not stopped or overloaded",
    Fault.TIMEOUT: "it did not answer in time; check address, firewall, redis:// against rediss://, and that it is not "
    "stopped or overloaded",
    Fault.REFUSED: "nobody listens there; start the server or correct the address",
    Fault.UNREACHABLE: "check the address (of a Unix socket: path and permissions) and the network",
    Fault.DNS: "the host name is not known; correct it, or check the name service",
    Fault.TLS: "no TLS connection; check rediss:// against redis://, tls_ca_file, and the name in the certificate",
    Fault.LOST: "it closed the connection; check that it is a Redis server, and redis:// against rediss://",
    Fault.PROTOCOL: "what answers is not a Redis server; correct the address",
    Fault.CREDENTIALS: "correct `username` and the password in `password_env` or `password_file`, or leave them out if "
    "the server has no password",
    Fault.PERMISSION: "its ACL forbids a command or the keys; docs/backends/redis.md lists what HiCache needs",
    Fault.CONNECTIONS: "it has as many clients as it allows; raise its maxclients or lower `connections`",
    Fault.LOADING: "it is still reading its data set; wait for it",
    Fault.BUSY: "it runs a long script; end that",
    Fault.PRIMARY_DOWN: "it is a replica without its primary; wait for the failover or repair the replication",
    Fault.CLUSTER_DOWN: "the cluster does not serve all slots; look at CLUSTER INFO",
    Fault.MOVED: "it is a node of a cluster; name its nodes under `cluster` instead",
    Fault.FOREIGN: "a server names a node outside `allowed_nodes` or the known cluster; allow that node if it is "
    "yours, or else do not trust that server",
    Fault.NO_PRIMARY: "no sentinel knows a primary of that name; check `service` and the sentinels",
    Fault.NO_THREAD: "this machine cannot start a thread; raise the limit on threads of the user or the container",
}
_NO_ADVICE = "look at the server's log"
# Error replies without a code of their own, by their text behind "ERR".
_TEXTS: tuple[tuple[bytes, Fault], ...] = (
    (b"max number of clients", Fault.CONNECTIONS),
    (b"invalid password", Fault.CREDENTIALS),
    (b"AUTH", Fault.CREDENTIALS),
    (b"No such master", Fault.NO_PRIMARY),
)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that the server has sent in place of a result. The connection is as good as before."""

    text: bytes = field(repr=False)

    @property
    def fault(self) -> Fault:
        """The class of error."""
        for start, fault in _TEXTS:
            if self.text.removeprefix(b"ERR ").startswith(start):
                return fault
        return _REPLIES.get(self.text.split(b" ", 1)[0], Fault.REPLY)

    @property
    def trouble(self) -> Trouble:
        """The same as an exception, whose detail is the error's code and the command that it names.

        A server may repeat what was sent to it, passwords and keys included, in any form. So words of the reply are
        shown only if they are in a table of this module.
        """
        code = self.text.split(b" ", 1)[0]
        words = [code] if code in _REPLIES or code in _OTHER_CODES else []
        words += [word for word in _QUOTED.findall(self.text[:_SEARCHED_BYTES]) if word.upper() in _COMMANDS][:1]
        return Trouble(self.fault, b" ".join(words).decode())


class Trouble(StoreError):
    """A connection or a request failed. Its detail holds nothing that we have sent and no word that a server has
    chosen."""

    def __init__(self, fault: Fault, detail: str = "") -> None:
        super().__init__(fault)
        self.fault = fault
        self.detail = detail

    def unavailable(self, where: str) -> BackendUnavailable:
        """What a constructor raises: what was tried, what came of it, what to do."""
        detail = f" ({self.detail})" if self.detail else ""
        return BackendUnavailable(f"redis at {where}: {self.fault}{detail}: {_ADVICE.get(self.fault, _NO_ADVICE)}")


def trouble_of(error: OSError) -> Trouble:
    """The trouble behind an exception of a socket."""
    fault = next(fault for kind, fault in _EXCEPTIONS if isinstance(error, kind))
    # The text of a TLS error may name the host, which a server may have chosen.
    text = str(getattr(error, "verify_message", error.reason)) if isinstance(error, ssl.SSLError) else str(error)
    return Trouble(fault, text.partition(",")[0])
