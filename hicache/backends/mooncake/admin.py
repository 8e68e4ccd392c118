"""A client of the master's HTTP server: its counters, and the list of all keys. Mooncake offers only plain HTTP without
authentication, so use it only over a trusted network."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from ...config.addresses import Address, split_address
from ...config.mooncake_storage import MooncakeStorageOptions
from ..base import Usage
from ..errors import ErrorKind, StoreError

# The metrics take a millisecond; a list of a million keys takes a few seconds.
TIMEOUT_S = 10.0
# Keys per request. They are in the URL, about 140 bytes each.
_KEYS_PER_QUESTION = 50
_ANSWER_BYTES_MAX = 1 << 30
# Mooncake's default port of the master's HTTP server.
_ADMIN_PORT = 9003


def admin_address(options: MooncakeStorageOptions) -> Address:
    """Return host and port of the master's HTTP server."""
    if options.admin is not None:
        return split_address(options.admin)
    return Address(split_address(options.master).host, _ADMIN_PORT)


class Admin:
    """Requests to the master, each on a new connection. Without an answer, methods block for about `TIMEOUT_S` and
    raise StoreError."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def usage(self) -> Usage:
        """Return the pages and bytes in all segments, of all applications, and the capacity of the segments."""
        figures = dict(line.partition(" ")[::2] for line in self._ask("/metrics").splitlines())
        try:
            return Usage(
                pages=int(float(figures["master_key_count"])),
                bytes=int(float(figures["master_allocated_bytes"])),
                capacity_bytes=int(float(figures["master_total_capacity_bytes"])),
            )
        except (KeyError, ValueError, OverflowError) as error:
            raise self._trouble("does not report keys and bytes, so it may not be a Mooncake master") from error

    def all_keys(self) -> list[str]:
        """Return every key in the store."""
        return self._ask("/get_all_keys").split("\n")[:-1]

    def sizes(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield each of `keys` that is stored, with its size in bytes. Unlike a client's lookup, grants no leases."""
        for start in range(0, len(keys), _KEYS_PER_QUESTION):
            some = keys[start : start + _KEYS_PER_QUESTION]
            answer = self._ask("/batch_query_keys?keys=" + ",".join(quote(key) for key in some))
            try:
                found = json.loads(answer)["data"]
                for key in some:
                    replicas = found[key]["values"] if found[key]["ok"] else None
                    if replicas:
                        yield key, int(replicas[0]["size_"])
            except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise self._trouble("gave an unexpected answer, so its version may not be supported") from error

    def _ask(self, path: str) -> str:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            status, body = answer.status, answer.read(_ANSWER_BYTES_MAX)
            # A cut list looks like a shorter list, and a purge would treat it as complete.
            is_cut = bool(answer.length) or bool(answer.read(1))
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: the size of a chunk
            raise self._trouble(f"does not answer ({type(error).__name__})") from error
        finally:
            connection.close()
        if status != http.HTTPStatus.OK:
            raise self._trouble(f"answered {status}")
        if is_cut:
            raise self._trouble(f"gave {len(body)} bytes of a longer answer", "try again")
        return body.decode("utf-8", errors="replace")

    def _trouble(self, what: str, remedy: str = "set `admin` to its --metrics_host and --metrics_port") -> StoreError:
        host, port = self._address
        words = f"mooncake store: the master's HTTP server {host}:{port} {what}; {remedy}"
        return StoreError(ErrorKind.ADMIN, explanation=words)
