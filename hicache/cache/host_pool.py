"""Opens L2 as the section `host` configures it: private memory, or named memory that a storage daemon also maps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from ..backends.kept import KeptFrames
from ..backends.remote import create_memory
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..config.remote_storage import RemoteStorageOptions
from ..errors import InvalidInput
from ..frame import FrameCodec, TagKind
from ..geometry import KVGeometry, PageShape, page_shape
from ..keys import Namespace
from ..shared_memory import Role
from ..tiers import HostPool, SharedHostPool
from ..tiers.shared import shape_digest

logger = logging.getLogger(__name__)

# A daemon notices within half a second that the previous engine has died, and unmaps its memory.
_OPEN_S = 10.0


def open_host_pool(
    config: HiCacheConfig, shape: PageShape | KVGeometry, pages: int | Callable[[], int], *, pin: torch.device | None,
    rank: int | None = None,
) -> HostPool:
    """Open the pool of this process, which is rank `rank` of its engine. Blocks. Takes over named memory of a crashed
    engine, and waits up to `_OPEN_S` for an engine that has it open.

    Raises CapacityError if it does not fit, SharedMemoryError if another process has memory of that name, and
    BackendError if a daemon must create it and does not.
    """
    name = config.host.shared.name
    if name is None:
        return HostPool(shape, pages() if callable(pages) else pages, pin=pin)
    if rank is not None:
        name = f"{name}.{rank}"
    role = Role.ALONE
    if config.host.shared.owner == "daemon" and config.storage is not None:
        options = config.storage.options
        assert isinstance(options, RemoteStorageOptions) and not callable(pages)  # the configuration has checked it
        create_memory(options, name, shape_digest(page_shape(shape)), page_shape(shape).payload_bytes, pages)
        role = Role.GUEST
    return SharedHostPool(name, shape, pages, pin=pin, timeout_s=_OPEN_S, role=role, keep=config.host.shared.keep)


def host_codecs(
    config: HiCacheConfig, namespace: Namespace, environ: Mapping[str, str] | None, clock: Clock = SYSTEM_CLOCK
) -> Callable[[int], FrameCodec]:
    """Return a function that makes the codec of frames on L2 for a weights epoch: that of storage, without compression
    and encryption. Reads MAC keys once, here. Raises ConfigError."""
    keys = config.integrity.keys(environ)

    def make(epoch: int) -> FrameCodec:
        return FrameCodec(
            replace(namespace, weights_epoch=epoch).digest, namespace.shape.payload_bytes,
            tag=TagKind[config.integrity.tag.upper()], mac_keys=keys, weights_epoch=epoch, label=namespace.name,
            clock=clock,
        )

    return make


def adopt_frames(pool: HostPool, codec: FrameCodec) -> KeptFrames:
    """Adopt the pages that a previous process has sealed for `codec` in an unused pool."""
    kept = KeptFrames(codec, pool.pages, pool.frame)
    pages = pool.allocator.alloc(pool.pages)
    if pages is None:
        raise InvalidInput(f"host: {pool.allocator.used_pages} pages are in use; each cache needs its own pool")
    pool.allocator.free(np.setdiff1d(pages, np.array(kept.pages, np.int32))[::-1].copy())
    if kept.held:
        logger.info("L2 memory of a previous process is reused: %d of %d pages can be hits", kept.held, pool.pages)
    return kept


def release_of(pool: HostPool) -> Callable[[], None]:
    """Return a function that removes the name of a pool of `open_host_pool`; it does nothing for kept memory."""
    return pool.unlink if isinstance(pool, SharedHostPool) and not pool.keep else lambda: None


@contextlib.contextmanager
def released_on_failure(pool: HostPool) -> Iterator[None]:
    """Remove `pool` completely if the block, which makes a cache over it, fails."""
    try:
        yield
    except BaseException:
        release_of(pool)()
        raise
