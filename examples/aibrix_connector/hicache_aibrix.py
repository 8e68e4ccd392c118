"""HiCache's stores as the second level (L2) of AIBrix's KV cache: the connector `HICACHE`, which `register` adds.

A block of AIBrix is a page; its key is the SHA-256 of AIBrix's key. Its bytes move from and to AIBrix's memory without
a copy, on the threads of AIBrix's executor. The README explains the two variables.
"""

import hashlib
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from aibrix_kvcache import MemoryRegion, Status, StatusCodes, envs
from aibrix_kvcache.common import AsyncBase
from aibrix_kvcache.l2.connectors import Connector, ConnectorConfig, ConnectorFeature

from hicache import Namespace, PageShape, Piece, load_config, open_storage
from hicache.frame import HEADER_BYTES, PageView

_CODES = (StatusCodes.NOT_FOUND, StatusCodes.OK)  # by whether a block is stored


def _page_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _page(mr: MemoryRegion) -> PageView:
    return PageView(memoryview(bytearray(HEADER_BYTES)), [memoryview(mr.slab[mr.addr : mr.addr + mr.length].numpy())])


@AsyncBase.async_wrap(exists="_exists", get="_get", put="_put", mget="_mget", mput="_mput", delete="_delete")
class HiCacheConnector(Connector, AsyncBase):
    """See `Connector` of AIBrix for each function. A block of another size raises InvalidInput."""
    name, feature, open = "HICACHE", ConnectorFeature(mput_mget=True), staticmethod(Status.ok)

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config.executor)
        settings, size = load_config(os.environ["AIBRIX_HICACHE_CONFIG"]), int(os.environ["AIBRIX_HICACHE_BLOCK_BYTES"])
        name = "_".join(value for value in vars(config).values() if isinstance(value, str))
        self._storage = open_storage(settings, Namespace(name, PageShape(settings.page_size, (Piece("block", size),))))
        self._timeout_s = settings.page_size * envs.AIBRIX_KV_CACHE_OL_L2_CACHE_PER_TOKEN_TIMEOUT_MS / 1000

    def close(self) -> Status:
        return Status.ok(self._storage.close())

    def get_batches(self, keys: Sequence[Any], mrs: Sequence[Any], batch_size: int) -> list[list[tuple[Any, Any]]]:
        """Return one batch: after a hole in a batch, AIBrix goes on to the next one and counts its blocks too."""
        return [list(zip(keys, mrs, strict=True))]

    def _mget(self, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> list[Status]:
        """AIBrix uses as many blocks from the start as are OK, so none after a hole is."""
        deadline = time.monotonic() + len(keys) * self._timeout_s
        outcomes = self._storage.batch_get(list(map(_page_key, keys)), list(map(_page, mrs)), deadline=deadline)
        return [Status(_CODES[ok]) for ok in itertools.accumulate((one == "hit" for one in outcomes), min)]

    def _mput(self, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> list[Status] | Status:
        """A failure is one Status for all: AIBrix cannot return one from a list."""
        pages, deadline = list(map(_page, mrs)), time.monotonic() + len(keys) * self._timeout_s
        outcomes = self._storage.batch_set(list(map(_page_key, keys)), pages, parent=None, deadline=deadline)
        failed = [outcome for outcome in outcomes if not outcome.is_stored]
        return Status(StatusCodes.ERROR, f"{len(failed)} blocks: {failed[0]}") if failed else [Status.ok()] * len(keys)

    def _get(self, key: bytes, mr: MemoryRegion) -> Status:
        return self._mget([key], [mr])[0]

    def _put(self, key: bytes, mr: MemoryRegion) -> Status:
        return Status(self._mput([key], [mr]))

    def _exists(self, key: bytes) -> Status:
        return Status(_CODES[self._storage.batch_has([_page_key(key)], deadline=time.monotonic() + self._timeout_s)[0]])

    def _delete(self, key: bytes) -> Status:
        return Status(_CODES[self._storage.delete([_page_key(key)], deadline=time.monotonic() + self._timeout_s)])


def register() -> None:
    """Wrap `Connector.create` of AIBrix, which has no hook for others. Call it before AIBrix creates its cache."""
    Connector.create = staticmethod(lambda config, create=Connector.create, **more: HiCacheConnector(config)
                                    if config.backend_name == "HICACHE" else create(config, **more))
