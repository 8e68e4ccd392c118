"""Opens the configured store: makes the codec of a namespace with the configured keys and formats."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .. import tracing
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..errors import ConfigError
from ..frame import Compression, FrameCodec, TagKind
from .registry import BackendSpec, open_spec
from .storage import Storage

# The size of elements for which byte planes help: float16 and bfloat16.
_PLANES_ELEMENT_BYTES = 2


class StorageOpener:
    """Opens the storage of one configuration for namespaces. The constructor reads the keys once, and switches spans on
    as configured.

    `element_bytes` is the size of a KV element, None if unknown; `clock` is the clock of the stores that it opens.
    `spec` is None without storage. Raises ConfigError for keys that cannot be read, and as `tracing.enable`.
    Thread-safe.
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
        self._tag = TagKind[config.integrity.tag.upper()]
        self._mac_keys = config.integrity.keys(environ)
        self._encryption_keys = chosen.keys(environ)
        self._compression: Compression | None = None
        if chosen.compression != "none":
            planes = element_bytes == _PLANES_ELEMENT_BYTES
            self._compression = Compression(byte_planes=planes)

    def codec(self, namespace: bytes, payload_bytes: int, *, weights_epoch: int, label: str) -> FrameCodec:
        """Return the codec that seals and verifies pages of the namespace with this digest. Raises as FrameCodec."""
        return FrameCodec(
            namespace,
            payload_bytes,
            tag=self._tag,
            mac_keys=self._mac_keys,
            encryption_keys=self._encryption_keys,
            compression=self._compression,
            weights_epoch=weights_epoch,
            label=label,
            clock=self._clock,
        )

    def open(self, codec: FrameCodec, part: BackendSpec | None = None) -> Storage:
        """Open the store, or a `part` of it, with the pages of `codec`, behind its guard. Blocks and raises as
        `open_spec`; raises ConfigError without storage."""
        spec = part or self.spec
        if spec is None:
            raise ConfigError("storage: is not configured; add the section `storage` with the type of the store")
        return open_spec(spec, codec, self._clock)
