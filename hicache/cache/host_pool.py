"""L2 as `host` asks for it: private memory, or memory under a name, which a storage daemon maps too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..backends.remote import create_memory
from ..config import HiCacheConfig
from ..config.remote_storage import RemoteStorageOptions
from ..frame import FrameCodec, TagKind
from ..geometry import KVGeometry, PageShape, page_shape
from ..keys import Namespace
from ..shared_memory import Role
from ..tiers import HostPool, SharedHostPool
from ..tiers.shared import shape_digest

# A daemon notices within half a second that the engine has died that had this memory before, and lets go of it.
_OPEN_S = 10.0


def open_host_pool(
    config: HiCacheConfig, shape: PageShape | KVGeometry, pages: int, *, pin: bool, rank: int | None = None
) -> HostPool:
    """Open the pool of this process, which is rank `rank` of its engine. Blocks; memory under a name that a crashed
    engine has left is taken over, and an engine that has it open is waited for until `_OPEN_S`.

    Raises CapacityError if it does not fit, SharedMemoryError if another process has memory under that name, and
    BackendError if a daemon is to create it and does not.
    """
    name = config.host.shared.name
    if name is None:
        return HostPool(shape, pages, pin=pin)
    if rank is not None:
        name = f"{name}.{rank}"
    role = Role.ALONE
    if config.host.shared.owner == "daemon" and config.storage is not None:
        options = config.storage.options
        assert isinstance(options, RemoteStorageOptions)  # checked with the configuration
        create_memory(options, name, shape_digest(page_shape(shape)), page_shape(shape).payload_bytes, pages)
        role = Role.GUEST
    return SharedHostPool.open(name, shape, pages, pin=pin, timeout_s=_OPEN_S, role=role)


def host_codecs(
    config: HiCacheConfig, namespace: Namespace, environ: Mapping[str, str] | None
) -> Callable[[int], FrameCodec]:
    """Return what makes the codec of frames on L2 for a weights epoch: that of storage, but frames on L2 are plain. MAC
    keys are read once, here. Raises ConfigError."""
    keys = config.integrity.keys(environ)

    def make(epoch: int) -> FrameCodec:
        return FrameCodec(
            replace(namespace, weights_epoch=epoch).digest,
            namespace.geometry.payload_bytes,
            tag=TagKind[config.integrity.tag.upper()],
            mac_keys=keys,
            weights_epoch=epoch,
            label=namespace.label or namespace.model,
        )

    return make


def release_of(pool: HostPool) -> Callable[[], None]:
    """Return what removes the name of a pool that `open_host_pool` has opened, so that nothing is left of it."""
    return pool.unlink if isinstance(pool, SharedHostPool) else _nothing


def _nothing() -> None:
    return None


@contextlib.contextmanager
def released_on_failure(pool: HostPool) -> Iterator[None]:
    """The block makes a cache over `pool`. If it fails, nothing is left of the pool."""
    try:
        yield
    except BaseException:
        release_of(pool)()
        raise
