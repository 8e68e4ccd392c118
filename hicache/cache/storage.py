"""Which storage a cache uses: none for a while, another one, or this one in one direction only. At run time, with work
under way. Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from ..arguments import instance
from ..backends.base import StorageBackend
from ..backends.guard import Direction, Override
from ..controller import HiCacheController
from ..errors import BackendError, InvalidInput
from .prefetch import Prefetcher
from .trees import Trees

OpenStorage = Callable[[int], StorageBackend]


class StorageControl:
    """The operator's side of a cache's storage. No method blocks.

    With ranks, all make the same call in the same step, but for `override`, where one that switches a direction off is
    enough. `open_storage` opens the store of a weights epoch; without one, only `attach` with another brings it back.
    """

    def __init__(
        self,
        controller: HiCacheController,
        trees: Trees,
        prefetcher: Prefetcher,
        open_storage: OpenStorage | None,
        weights_epoch: int,
    ) -> None:
        self._controller = controller
        self._trees = trees
        self._prefetcher = prefetcher
        _require_opener(open_storage)
        self._configured = self._open_storage = open_storage
        self._epoch = weights_epoch

    @property
    def attached(self) -> bool:
        """Whether the cache has storage, open or still being opened."""
        return self._controller.gate.attached

    def detach(self) -> None:
        """Use no storage from now on; does nothing without one.

        Prefetches under way end with nothing, stores as not stored; the backend is closed once nobody works with it.
        Visits every node of the tree, to forget that it was stored.
        """
        if not self.attached:
            return
        self._prefetcher.cancel_all()
        self._trees.current.forget_stored()
        self._controller.detach_backend()

    def attach(self, open_storage: OpenStorage | None = None) -> None:
        """Use the storage that `open_storage` opens for a weights epoch, now and for later epochs; None for the one
        that the cache was built with. What was attached is detached.

        It is opened on a thread of its own, and tried again if that fails or gives something other than a
        StorageBackend; until then there is none. What is on L2 is stored there when it is used next. Raises
        InvalidInput if there is nothing to open, for something that cannot be called, and once the cache is closed;
        nothing has changed then.
        """
        opener = self._configured if open_storage is None else open_storage
        _require_opener(opener)
        if opener is None:
            raise InvalidInput("storage: the cache was built without any; say how to open one")
        if self._controller.closed:
            raise InvalidInput("the cache is closed; build a new one")
        self.detach()
        self._open_storage = opener
        self._controller.replace_backend(functools.partial(_open, opener, self._epoch))

    def override(self, direction: Direction, mode: Override, store: str | None = None) -> None:
        """Switch reading or writing off, or on whatever happens, or leave it to the breaker (AUTO): of `store`, one of
        a composition, or of all. Holds for later stores too. Stores without a guard do not listen."""
        direction, mode = instance("direction", direction, Direction), instance("mode", mode, Override)
        self._controller.gate.override(direction, mode, store)

    @property
    def overrides(self) -> Mapping[tuple[Direction, str | None], Override]:
        """What is not left to the breakers; without a store, of all of them."""
        return self._controller.gate.overrides.modes

    def require_opener(self) -> None:
        """Raises InvalidInput if there is storage that cannot be opened for another epoch."""
        if self._open_storage is None and self.attached:
            raise InvalidInput("weights update: the cache has storage, but no open_storage to open that of a new epoch")

    def use_epoch(self, epoch: int) -> None:
        """Open the store of new weights, if there is storage now; one that is attached later is that of `epoch` too.
        REQUIRES: `require_opener` has passed, and the tree is empty."""
        self._epoch = epoch
        if self.attached and self._open_storage is not None:
            self._controller.replace_backend(functools.partial(_open, self._open_storage, epoch))


def _require_opener(open_storage: object) -> None:
    """Raises InvalidInput for something that cannot be called, such as a store that is open already. None passes."""
    if open_storage is not None and not callable(open_storage):
        kind = type(open_storage).__name__
        raise InvalidInput(f"open_storage: a {kind} cannot be called; pass a function from a weights epoch to a store")


def _open(open_storage: OpenStorage, epoch: int) -> StorageBackend:
    """Open the store of an epoch, on a worker. Raises BackendError for something that no worker could use."""
    backend: object = open_storage(epoch)
    if not isinstance(backend, StorageBackend):
        raise BackendError(f"open_storage gave a {type(backend).__name__} and not a StorageBackend; correct it")
    return backend
