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
