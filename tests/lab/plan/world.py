"""Small traces and paths for the tests of plans."""

from __future__ import annotations

import itertools
import struct

import numpy as np

from hicache.lab.plan.pages import Path


def items(path: Path) -> list[tuple[int, int]]:
    """Return the items of a path as (id, end)."""
    return [(id_, end) for id_, end in np.frombuffer(path, "<i8").reshape(-1, 2).tolist()]


def path(ids: tuple[int, ...]) -> Path:
    """Return the path with one id for each page."""
    packed, end = b"", 0
    for id_, equal in itertools.groupby(ids):
        end += len(list(equal))
        packed += struct.pack("<2q", id_, end)
    return packed
