"""The admin surface: operators' requests to a running daemon, or to the cache inside an engine, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import HiCacheConfig
from ..errors import MissingPackage, install_hint

if TYPE_CHECKING:
    from ..cache import HostCache, TreeCache
    from ..keys import Namespace
    from .embedded import AdminServer

__all__ = ["serve_configured"]


def serve_configured(
    config: HiCacheConfig, cache: TreeCache | HostCache, namespace: Namespace, *,
    environ: Mapping[str, str] | None = None,
) -> AdminServer | None:
    """Serve the admin surface of `cache`, built from `config` and `namespace`, as the section `admin` configures it.
    Return None without a socket, and for a ChunkCache, which does not keep pages. Starts a thread; close the result
    before the cache. Call it on one rank. Raises ConfigError, and MissingPackage without the extra `daemon`.
    """
    if config.admin.socket is None:
        return None
    try:
        from .embedded import serve  # noqa: PLC0415 - a cache without an admin surface needs no server
    except ModuleNotFoundError as error:
        raise MissingPackage(f"admin.socket: the package {error.name} is missing; {install_hint('daemon')}") from error
    return serve(config, config.admin.socket, cache, namespace, environ)
