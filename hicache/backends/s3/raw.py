"""A bucket as its operator sees it. See RawStore."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from ...config.s3_storage import S3StorageOptions
from ...errors import BackendUnavailable
from ..errors import ErrorKind, StoreError
from ..raw import RawStore, StoredPage
from .objects import Objects

# The time limit for one page, or for one request about many pages. It can be long, because no engine waits.
_REQUEST_S = 60.0
# Listing a large bucket may take long; `timeout` limits each of its requests.
_LISTING_S = 24 * 3600.0


class S3RawStore(RawStore):
    """See RawStore. `used_s` is the time when a page was stored. `remove` also counts pages that were already missing,
    because the API does not report them. Raises BackendUnavailable and ConfigError as S3Driver."""

    def __init__(self, options: S3StorageOptions) -> None:
        self._objects = Objects(options)

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore. One request per thousand pages."""
        with _for_an_operator():
            yield from self._objects.pages(namespace, deadline=time.monotonic() + _LISTING_S)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore."""
        name = self._objects.name(page.namespace, page.key)
        with _for_an_operator():
            return self._objects.client.get_start(name, bytes_max, deadline=time.monotonic() + _REQUEST_S)

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. A bucket stores no chains; the header in `data` has the parent."""
        name = self._objects.name(page.namespace, page.key)
        with _for_an_operator():
            try:
                return self._objects.put_new(name, [memoryview(data)], deadline=time.monotonic() + _REQUEST_S)
            except StoreError as error:
                if error.kind is not ErrorKind.NO_SPACE:
                    raise
                return False

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore. One request per thousand pages."""
        names = [self._objects.name(page.namespace, page.key) for page in pages]
        with _for_an_operator():
            kinds = self._objects.remove_many(names, deadline=time.monotonic() + _REQUEST_S)
        if kinds:
            raise BackendUnavailable(
                f"s3 store: {len(kinds)} of {len(names)} pages were not removed: {kinds[0]}; try again"
            )
        return len(names)

    def close(self) -> None:
        """See RawStore."""
        self._objects.close()


@contextlib.contextmanager
def _for_an_operator() -> Iterator[None]:
    """Turn StoreError into BackendUnavailable."""
    try:
        yield
    except StoreError as error:
        raise BackendUnavailable(f"s3 store: {error}; try again when the store works") from error
