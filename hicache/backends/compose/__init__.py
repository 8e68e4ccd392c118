"""Backends made of other backends: levels, mirrors and sharded sets. See docs/backends/composition.md."""

from __future__ import annotations

from ...config.composed_storage import LevelsOptions, MirrorOptions, ShardedOptions
from ...frame import FrameCodec
from ..registry import part_specs
from .composed import ComposedBackend, CopyingBackend, Part, close_parts, copies_of, open_parts
from .copier import CopyStatistics
from .levels import LevelsBackend
from .mirror import MirrorBackend
from .sharded import Placement, ShardCodec, ShardedBackend

__all__ = [
    "ComposedBackend",
    "CopyStatistics",
    "CopyingBackend",
    "LevelsBackend",
    "MirrorBackend",
    "Part",
    "Placement",
    "ShardCodec",
    "ShardedBackend",
    "copies_of",
    "open_levels",
    "open_mirror",
    "open_sharded",
]


def open_levels(codec: FrameCodec, options: LevelsOptions) -> LevelsBackend:
    """The factory behind the name `levels`. Blocks and raises as opening each of the levels does."""
    parts = open_parts(codec, part_specs("levels", options))
    try:
        return LevelsBackend(codec, parts, options)
    except BaseException:
        close_parts(parts)
        raise


def open_mirror(codec: FrameCodec, options: MirrorOptions) -> MirrorBackend:
    """The factory behind the name `mirror`. Blocks and raises as opening each of the parts does."""
    opened = open_parts(codec, part_specs("mirror", options))
    try:
        return MirrorBackend(
            codec, opened, write_quorum=options.write_quorum, copy_bytes_max=options.repair_bytes_max
        )
    except BaseException:
        close_parts(opened)
        raise


def open_sharded(codec: FrameCodec, options: ShardedOptions) -> ShardedBackend:
    """The factory behind the name `sharded`. Blocks and raises as opening each of the parts does."""
    shard_codec = ShardCodec(codec)
    opened = open_parts(shard_codec, part_specs("sharded", options))
    try:
        return ShardedBackend(shard_codec, opened)
    except BaseException:
        close_parts(opened)
        raise
