"""Changes the storage of a running cache: detach, attach another, or switch off one direction. Owned by the scheduler
thread; no lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..arguments import instance
from ..backends.base import Direction
from ..backends.guard import Override
from ..backends.storage import Storage
from ..controller import HiCacheController
from ..errors import BackendError, InvalidInput
from .prefetch import Prefetcher
from .trees import Trees

OpenStorage = Callable[[int], Storage]


@dataclass(eq=False, repr=False)
class StorageControl:
    """The operator's controls of a cache's storage. Methods do not block.

    With ranks, all make the same call in the same step, except for `override`: one rank that switches a direction off
    is enough. `_open_storage` opens the store of a weights epoch; without it, `attach` needs an argument.
    """

    _controller: HiCacheController
    _trees: Trees
    _prefetcher: Prefetcher
    _open_storage: OpenStorage | None
    _epoch: int

    def __post_init__(self) -> None:
        _require_opener(self._open_storage)
        self._configured = self._open_storage

    @property
    def attached(self) -> bool:
        """True if the cache has storage, open or being opened."""
        return self._controller.gate.attached

    def detach(self) -> None:
        """Stop using storage; does nothing without storage.

        Prefetches in flight end without pages, and stores in flight as not stored. The backend is closed after its last
        call. Visits every node of the tree, to forget that it was stored.
        """
        if not self.attached:
            return
        self._prefetcher.cancel_all()
        self._trees.current.stored.forget_all()
        self._controller.detach_backend()

    def attach(self, open_storage: OpenStorage | None = None) -> None:
        """Use the storage that `open_storage` opens for the current weights epoch and for later ones; None for the
        storage that the cache was built with. Detaches the current storage.

        A thread opens it, and tries again if that fails or returns something other than a Storage; until then
        the cache has no storage. Pages on L2 are stored there at their next use. Raises InvalidInput, changing nothing,
        if there is nothing to open, if `open_storage` cannot be called, and after the cache is closed.
        """
        opener = self._configured if open_storage is None else open_storage
        _require_opener(opener)
        if opener is None:
            raise InvalidInput("storage: the cache was built without storage; pass open_storage")
        if self._controller.closed:
            raise InvalidInput("the cache is closed; build a new one")
        self.detach()
        self._open_storage = opener
        self._controller.replace_backend(functools.partial(_open, opener, self._epoch))

    def override(self, direction: Direction, mode: Override, store: str | None = None) -> None:
        """Force reading or writing off or on, or leave it to the breaker (AUTO), for `store`, one of a composition, or
        for all stores. Also applies to stores opened later. Stores without a guard ignore it."""
        direction, mode = instance("direction", direction, Direction), instance("mode", mode, Override)
        self._controller.gate.slot.override(direction, mode, store)

    @property
    def overrides(self) -> Mapping[tuple[Direction, str | None], Override]:
        """Return the directions that are not left to the breakers; None as the store means all stores."""
        return self._controller.gate.slot.overrides.modes

    def require_opener(self) -> None:
        """Raises InvalidInput if the storage cannot be opened for another epoch."""
        if self._open_storage is None and self.attached:
            raise InvalidInput("weights update: storage cannot be opened for a new epoch; give the cache open_storage")

    def use_epoch(self, epoch: int) -> None:
        """Open the store of `epoch` if there is storage now; storage attached later is also opened for `epoch`.
        REQUIRES: `require_opener` has passed, and the tree is empty."""
        self._epoch = epoch
        if self.attached and self._open_storage is not None:
            self._controller.replace_backend(functools.partial(_open, self._open_storage, epoch))


def _require_opener(open_storage: object) -> None:
    """Raises InvalidInput for a value that cannot be called, such as an open store. Accepts None."""
    if open_storage is not None and not callable(open_storage):
        kind = type(open_storage).__name__
        raise InvalidInput(f"open_storage: a {kind} cannot be called; pass a function from a weights epoch to a store")


def _open(open_storage: OpenStorage, epoch: int) -> Storage:
    """Open the store of an epoch, on a worker. Raises BackendError if the result is not a Storage."""
    backend: object = open_storage(epoch)
    if not isinstance(backend, Storage):
        raise BackendError(f"open_storage returned a {type(backend).__name__}; it must return a Storage")
    return backend
