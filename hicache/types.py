"""Array types that several layers share."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# Page ids, int32, one-dimensional, in host memory. Token indices are made only if an engine requests them.
PageIds: TypeAlias = npt.NDArray[np.int32]
# Page or block ids in the dtype that numpy uses for indexing. It converts other dtypes at each use, and releases the
# interpreter's lock while it does.
Indices: TypeAlias = npt.NDArray[np.intp]
# Addresses and sizes in bytes, one-dimensional and contiguous.
Addresses: TypeAlias = npt.NDArray[np.int64]
Bytes2D: TypeAlias = npt.NDArray[np.uint8]

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)


def concat(runs: list[PageIds]) -> PageIds:
    """Return the runs as one array: a single run itself, otherwise a read-only copy.

    Joining bytes takes half the time of `np.concatenate`. REQUIRES: the runs are int32.
    """
    if len(runs) > 1:
        return np.frombuffer(b"".join(runs), dtype=np.int32)  # type: ignore[arg-type]  # an array is a buffer
    return runs[0] if runs else NO_PAGES
