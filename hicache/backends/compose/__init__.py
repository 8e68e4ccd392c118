"""Storage composed of several stores: levels and sharded sets. See docs/backends/composition.md."""

from __future__ import annotations

from ...clock import SYSTEM_CLOCK, Clock
from ...config.storage import LevelsOptions, ShardedOptions
from ...frame import FrameCodec
from .composed import Part, open_composed
from .copier import CopyStatistics
from .levels import Levels, copies_of
from .sharded import ShardCodec, Shards

__all__ = ["CopyStatistics", "Levels", "Part", "Shards", "copies_of", "open_levels", "open_sharded"]


def open_levels(codec: FrameCodec, options: LevelsOptions, clock: Clock = SYSTEM_CLOCK) -> Levels:
    """Open storage of the type `levels`. Blocks and raises as opening each level does."""
    return open_composed("levels", codec, options, lambda levels: Levels(
        codec, levels, promote=options.promote, cascade_bytes_max=options.cascade_bytes_max, clock=clock
    ), clock)


def open_sharded(codec: FrameCodec, options: ShardedOptions, clock: Clock = SYSTEM_CLOCK) -> Shards:
    """Open storage of the type `sharded`. Blocks and raises as opening each part does."""
    shard_codec = ShardCodec(codec)
    return open_composed("sharded", shard_codec, options, lambda parts: Shards(shard_codec, parts), clock)
