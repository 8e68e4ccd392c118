"""Array types that several layers share."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# Page ids, int32, one-dimensional, in host memory. Token indices are made only where an engine wants them.
PageIds: TypeAlias = npt.NDArray[np.int32]
# Page or block ids as numpy indexes with them; it converts others for each use, and lets another thread run meanwhile.
Indices: TypeAlias = npt.NDArray[np.intp]
# Addresses and sizes in bytes, one-dimensional and contiguous.
Addresses: TypeAlias = npt.NDArray[np.int64]
Bytes2D: TypeAlias = npt.NDArray[np.uint8]

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)
