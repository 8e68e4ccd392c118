"""Runs the Triton kernels of staging on the CPU, in Triton's interpreter, against copies byte by byte.

    TRITON_INTERPRET=1 python -m tests.tiers._interpreted_rows

A process of its own, for the reason in `_interpreted_slots`. A difference ends it with a traceback.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hicache.tiers import rows_triton
from hicache.tiers.runtime import Rows

GUARD = 0xDB

# Bytes of a block in each region of each layer, and how far apart blocks are, in blocks.
SHAPES: dict[str, tuple[list[list[int]], int]] = {
    "MHA, page of 1": ([[2 * 2 * 16 * 2]] * 3, 1),
    "MHA, page of 16, K and V apart": ([[16 * 2 * 16 * 2] * 2] * 2, 1),
    "MHA, page of 64, longer than a program moves at a time": ([[64 * 8 * 64 * 2]] * 2, 1),
    "MLA, page of 1": ([[1152]] * 4, 1),
    "MLA, fp8, page of 1": ([[576]] * 3, 1),
    "MLA, fp8 with scales, page of 3": ([[3 * 656]] * 2, 1),
    "K and V of a block side by side": ([[96]] * 3, 2),
    "odd sizes": ([[5], [3, 7], [1]], 3),
    "layers of different length": ([[64, 8], [128], [16]], 1),
}


def compare(name: str, rows: int, programs: int, seed: int) -> None:
    """Both kernels over one shape, for all layers and for a run of them."""
    layers, spread = SHAPES[name]
    numbers, sizes = np.random.default_rng(seed), [size for layer in layers for size in layer]
    columns = np.cumsum([0, *sizes])
    memory = [aligned(numbers.integers(0, 256, ((rows + 3) * spread * size), dtype=np.uint8)) for size in sizes]
    blocks = aligned(numbers.permutation(rows + 3)[:rows].astype(np.int64))
    starts = [region.ctypes.data for region in memory]
    rows_of_table = zip(starts, sizes, columns[:-1], strict=True)
    table = aligned(np.array([[start, spread * size, column, size] for start, size, column in rows_of_table]))
    for first, end in {(0, len(sizes)), (len(sizes) - 1, len(sizes)), (0, 1)}:
        column, row_bytes = int(columns[first]), int(columns[end] - columns[first])
        staging = aligned(numbers.integers(0, 256, rows * row_bytes + 64, dtype=np.uint8))
        numbers_of = [int(number) for number in table.ravel()] + [column, row_bytes, staging.ctypes.data]
        word = next(word for word in (8, 4, 2, 1) if math.gcd(*numbers_of) % word == 0)
        moved = Rows(
            staging.ctypes.data, row_bytes, table.ctypes.data, first, end - first, column, blocks.ctypes.data, rows,
            word, max(sizes[first:end]),
        )  # fmt: skip
        before = [region.copy() for region in memory], staging.copy()
        rows_triton.scatter_rows(moved, programs)
        expected = [region.copy() for region in before[0]]
        for row, block in enumerate(blocks.tolist()):
            for region in range(first, end):
                at, here = block * spread * sizes[region], row * row_bytes + columns[region] - column
                expected[region][at : at + sizes[region]] = before[1][here : here + sizes[region]]
        assert all(map(np.array_equal, memory, expected)), f"{name}: scatter of regions {first} to {end}"
        assert np.array_equal(staging, before[1])
        staging[:] = GUARD
        rows_triton.gather_rows(moved, programs)
        assert np.array_equal(staging[: rows * row_bytes], before[1][: rows * row_bytes]), f"{name}: gather"
        assert (staging[rows * row_bytes :] == GUARD).all() and all(map(np.array_equal, memory, expected))


def aligned(values: Any) -> Any:
    """Return a copy at an address that 16 divides, as those of a device are."""
    memory = np.zeros(values.nbytes + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :][: values.nbytes].view(values.dtype)
    memory[:] = values.ravel()
    return memory.reshape(values.shape)


def main() -> None:
    """Each shape, with one row and many, and fewer and more programs than there is work."""
    for seed, name in enumerate(SHAPES):
        for rows, programs in ((1, 4), (5, 1), (7, 3), (2, 64)):
            compare(name, rows, programs, seed)
    print("all equal")


if __name__ == "__main__":
    main()
