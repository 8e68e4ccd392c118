"""Backends composed of other backends: levels and sharded sets. See docs/backends/composition.md."""

from __future__ import annotations

from ...config.storage import LevelsOptions, ShardedOptions
from ...frame import FrameCodec
from .composed import Part, open_composed
from .copier import CopyStatistics
from .levels import LevelsBackend, copies_of
from .sharded import ShardCodec, ShardedBackend

__all__ = [
    "CopyStatistics",
    "LevelsBackend",
    "Part",
    "copies_of",
    "open_levels",
    "open_sharded",
]


def open_levels(codec: FrameCodec, options: LevelsOptions) -> LevelsBackend:
    """Open a backend of the type `levels`. Blocks and raises as opening each level does."""

    def compose(levels: list[Part]) -> LevelsBackend:
        return LevelsBackend(
            codec, levels, promote=options.promote, cascade_bytes_max=options.cascade_bytes_max
        )

    return open_composed("levels", codec, options, compose)


def open_sharded(codec: FrameCodec, options: ShardedOptions) -> ShardedBackend:
    """Open a backend of the type `sharded`. Blocks and raises as opening each part does."""
    shard_codec = ShardCodec(codec)
    return open_composed("sharded", shard_codec, options, lambda parts: ShardedBackend(shard_codec, parts))
