"""Backends made of other backends: levels, mirrors and sharded sets. See docs/backends/composition.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidInput
from ...frame import FrameCodec
from ..registry import part_specs
from .composed import ComposedBackend, CopyingBackend, Part, close_parts, copies_of, open_parts
from .copier import CopyStatistics
from .levels import COPY_BYTES_MAX, SELECTIVE_HITS, CascadePolicy, LevelsBackend, LevelsOptions
from .mirror import MirrorBackend
from .sharded import Placement, ShardCodec, ShardedBackend

__all__ = [
    "CascadePolicy",
    "ComposedBackend",
    "CopyStatistics",
    "CopyingBackend",
    "LevelsBackend",
    "LevelsOptions",
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


def open_levels(
    codec: FrameCodec,
    *,
    levels: Sequence[Mapping[str, Any]],
    promote: bool = True,
    write: str = CascadePolicy.THROUGH,
    selective_hits: int = SELECTIVE_HITS,
    cascade_bytes_max: int = COPY_BYTES_MAX,
) -> LevelsBackend:
    """The factory behind the name `levels`: these are parts as `registry.part_specs` takes them, fast ones first; the
    rest is LevelsOptions, with `write` for its `cascade`. Blocks and raises as opening each of them does."""
    if write not in list(CascadePolicy):
        raise InvalidInput(f"levels: write must be one of {', '.join(CascadePolicy)}; got {write!r}")
    options = LevelsOptions(promote, CascadePolicy(write), selective_hits, cascade_bytes_max)
    specs = part_specs("levels", {"levels": levels})
    if options.cascade is CascadePolicy.ON_EVICTION and any(spec.may_come_late for spec in specs[:-1]):
        raise InvalidInput("levels: with write: on_eviction only the last level may be optional; the others are heard")
    parts = open_parts(codec, specs)
    try:
        return LevelsBackend(codec, parts, options)
    except BaseException:
        close_parts(parts)
        raise


def open_mirror(
    codec: FrameCodec,
    *,
    parts: Sequence[Mapping[str, Any]],
    write_quorum: int = 1,
    repair_bytes_max: int = COPY_BYTES_MAX,
) -> MirrorBackend:
    """The factory behind the name `mirror`: at most `repair_bytes_max` bytes of copies wait for each of `parts`. See
    MirrorBackend for the rest. Blocks and raises as opening each of them does."""
    if type(repair_bytes_max) is not int or repair_bytes_max < 1:
        raise InvalidInput(f"mirror: repair_bytes_max must be a positive whole number, got {repair_bytes_max!r}")
    opened = open_parts(codec, part_specs("mirror", {"parts": parts}))
    try:
        return MirrorBackend(codec, opened, write_quorum=write_quorum, copy_bytes_max=repair_bytes_max)
    except BaseException:
        close_parts(opened)
        raise


def open_sharded(codec: FrameCodec, *, parts: Sequence[Mapping[str, Any]]) -> ShardedBackend:
    """The factory behind the name `sharded`: each of `parts` needs a `name`, since that decides which pages it has.

    Blocks and raises as opening each of them does.
    """
    specs = part_specs("sharded", {"parts": parts})
    for part in parts:
        if part.get("name") is None:
            raise InvalidInput("sharded: every part needs a name of its own, which decides which pages it has")
    shard_codec = ShardCodec(codec)
    opened = open_parts(shard_codec, specs)
    try:
        return ShardedBackend(shard_codec, opened)
    except BaseException:
        close_parts(opened)
        raise
