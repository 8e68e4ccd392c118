"""Backends made of other backends: levels, mirrors and sharded sets. See docs/backends/composition.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidInput
from ...frame import FrameCodec
from ..registry import part_specs
from .composed import ComposedBackend, CopyingBackend, Part, close_parts, open_parts
from .copier import CopyStatistics
from .levels import COPY_BYTES_MAX, SELECTIVE_HITS, CascadePolicy, LevelsBackend, LevelsOptions

__all__ = [
    "CascadePolicy",
    "ComposedBackend",
    "CopyStatistics",
    "CopyingBackend",
    "LevelsBackend",
    "LevelsOptions",
    "Part",
    "open_levels",
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
    parts = open_parts(codec, part_specs("levels", {"levels": levels}))
    try:
        return LevelsBackend(codec, parts, options)
    except BaseException:
        close_parts(parts)
        raise
