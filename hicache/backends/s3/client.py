"""What the backend asks of an S3 client: six requests, each tried once, with a deadline.

A client raises StoreError if it gets no answer; that an object is missing, or is there already, is an answer. Bodies
are lists of buffers, of any number and any sizes. Clients are used by any threads at once and never touch a buffer
after a call has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...frame import TagStream

# The buffers for an object of a size, of so many bytes together; none, and the object is not read.
Target: TypeAlias = Callable[[int], Sequence[memoryview]]
LISTED_MAX = 1000  # keys per page of a listing and per DeleteObjects: the API's own limit


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object that is there. `etag` is what the server calls its content, empty if it does not say."""

    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing; `modified_s` is Unix time, None if the server does not say."""

    name: str
    size_bytes: int
    modified_s: float | None


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a listing; `next_token` is None on the last one."""

    objects: Sequence[Listed]
    next_token: str | None


class Client(Protocol):
    """See the module's docstring."""

    def head(self, name: str, *, deadline: float) -> ObjectInfo | None:
        """Whether an object is there. A bucket that is not there looks like a missing object: HEAD has no body."""

    def get(
        self, name: str, target: Target, arrived: TagStream | None = None, *, deadline: float
    ) -> ObjectInfo | None:
        """Read an object into `target(its size)`; None if it is not there. `arrived` takes in each piece that comes."""

    def get_start(self, name: str, bytes_max: int, *, deadline: float) -> bytes | None:
        """The first `bytes_max` bytes of an object, None if it is not there."""

    def put(self, name: str, body: Sequence[memoryview], *, if_absent: bool, deadline: float) -> bool:
        """Store an object; False if `if_absent` and there is one already."""

    def remove(self, name: str, etag: str, *, deadline: float) -> None:
        """Remove an object if it still has `etag` (whatever it has, if that is empty). A missing one is no error."""

    def remove_many(self, names: Sequence[str], *, deadline: float) -> list[str]:
        """Remove up to LISTED_MAX objects; what went wrong with each that could not be. Missing ones are no error."""

    def list(self, prefix: str, token: str | None, keys_max: int, *, deadline: float) -> Listing:
        """One page of the objects whose names start with `prefix`."""

    def close(self) -> None:
        """Close the connections. REQUIRES: no request is under way."""
