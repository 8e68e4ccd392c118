"""Opens the configured store: makes the codec of a namespace with the configured keys and formats."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from .. import tracing
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..errors import ConfigError
from ..frame import Compression, FrameCodec, TagKind
from ..keys import Namespace
from .registry import BackendSpec, open_spec
from .storage import Storage

# The size of elements for which byte planes help: float16 and bfloat16.
_PLANES_ELEMENT_BYTES = 2


class StorageOpener:
    """Opens the storage of one configuration for namespaces. The constructor reads the keys once, and switches spans on
    as configured.

    `element_bytes` is the size of a KV element, None if unknown; `clock` is that of the stores. `spec` is None without
    storage. Raises ConfigError for keys that cannot be read, and as `tracing.enable`. Thread-safe.
    """

    def __init__(
        self, config: HiCacheConfig, environ: Mapping[str, str] | None = None, element_bytes: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if config.tracing.enabled:
            tracing.enable()
        self._clock = clock
        environ = os.environ if environ is None else environ
        chosen = config.storage_format
        self.spec = None if config.storage is None else BackendSpec.of(config.storage)
        compression = Compression(byte_planes=element_bytes == _PLANES_ELEMENT_BYTES)
        self._codec = functools.partial(
            FrameCodec, tag=TagKind[config.integrity.tag.upper()], mac_keys=config.integrity.keys(environ),
            encryption_keys=chosen.keys(environ), compression=None if chosen.compression == "none" else compression,
            clock=clock,
        )

    def codec(self, namespace: bytes, payload_bytes: int, *, weights_epoch: int, label: str) -> FrameCodec:
        """Return the codec that seals and verifies pages of the namespace with this digest. Raises as FrameCodec."""
        return self._codec(namespace, payload_bytes, weights_epoch=weights_epoch, label=label)

    def open(self, codec: FrameCodec, part: BackendSpec | None = None) -> Storage:
        """Open the store, or a `part` of it, with the pages of `codec`, behind its guard. Blocks and raises as
        `open_spec`; raises ConfigError without storage."""
        spec = part or self.spec
        if spec is None:
            raise ConfigError("storage: is not configured; add the section `storage` with the type of the store")
        return open_spec(spec, codec, self._clock)

    def open_namespace(self, namespace: Namespace) -> Storage:
        """Open the store for the pages of an engine, as `open`."""
        size, epoch = namespace.shape.payload_bytes, namespace.weights_epoch
        return self.open(self.codec(namespace.digest, size, weights_epoch=epoch, label=namespace.name))
