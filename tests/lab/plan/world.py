"""Small traces and paths for the tests of plans."""

from __future__ import annotations

import numpy as np

from hicache.lab.plan.pages import Path


def items(path: Path) -> list[tuple[int, int]]:
    """Return the items of a path as (id, end)."""
    return [(id_, end) for id_, end in np.frombuffer(path, "<i8").reshape(-1, 2).tolist()]
