"""Copies between blocks of an engine and rows of staging memory, as one Triton launch for any number of regions.

A staging row holds a run of layers of one block: the pieces of its regions, contiguous as in a host frame. A table in
device memory has the location of each region, so the same compiled kernel copies one layer or all of them. The tests
run the kernel in Triton's interpreter, without a GPU, and compare it with a loop of memmove.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..errors import InvalidInput
from .runtime import Rows

# The element type for each word size of `hicache.tiers.runtime.WORDS`; a word of 16 bytes is two integers.
_ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

# Elements that a program copies at a time, 16 per thread: 32 KiB in flight with elements of 8 bytes. At an estimated
# 1 us for a load and a store, two or three programs keep up with a link of 60 GB/s to the host.
_TILE = 4096
_WARPS = 8
# The kernel counts tiles in 32 bits, because a GPU divides these several times faster than 64 bits. The limit leaves
# room for a step past the last tile.
_TILES_MAX = 1 << 30


# All parameters have fixed types and none is specialised, so Triton compiles once per combination of the constexprs.
@triton.jit(do_not_specialize=["staging", "row_bytes", "regions", "count", "blocks", "rows", "chunks", "tiles"])
def _move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - a kernel takes no structures
    staging: tl.int64, row_bytes: tl.int64, regions: tl.int64, count: tl.int32, blocks: tl.int64, rows: tl.int32,
    chunks: tl.int32, tiles: tl.int32, element: tl.constexpr, word: tl.constexpr, vector: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, to_blocks: tl.constexpr,
):
    """Each program copies every num_programs-th tile: some rows of one region, or a chunk of one row.

    All addresses, strides and lengths are multiples of `word` bytes, which are `vector` elements. The compiler widens
    loads only if the code shows this: by products with `vector`, and by hints, which it accepts only for scalars.
    """
    row_elements = row_bytes // word * vector
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rest = tile // chunks
        entry = regions.to(tl.pointer_type(tl.int64)) + rest % count * 4
        region = tl.multiple_of(tl.load(entry).to(tl.pointer_type(element)), word)
        stride = tl.load(entry + 1) // word * vector
        column = tl.load(entry + 2)
        length = tl.load(entry + 3) // word * vector
        packed = tl.multiple_of((staging + column).to(tl.pointer_type(element)), word)

        row = rest // count * tile_rows + tl.arange(0, tile_rows)[:, None]
        block = tl.load(blocks.to(tl.pointer_type(tl.int64)) + row, mask=row < rows, other=0)
        offset = tile % chunks * tile_columns + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (offset < length)
        outside = region + block * stride + offset
        packed += row.to(tl.int64) * row_elements + offset
        if to_blocks:
            tl.store(outside, tl.load(packed, mask=inside), mask=inside)
        else:
            tl.store(packed, tl.load(outside, mask=inside), mask=inside)


def move_rows(rows: Rows, *, programs: int, to_blocks: bool) -> None:
    """Queue the copy `rows`, to the blocks or to staging, on torch's current stream. Does not block.

    REQUIRES: all addresses are in memory of the current device that stays allocated until the stream has passed the
    copy; block ids are unique and exist in the regions.

    `programs`: number of programs that share the work, and so the most multiprocessors it can use. A `longest` above
    the longest region is correct, but slower. The first call for each combination of direction, word and length
    (rounded up to a power of two) compiles the kernel, which blocks; a call with zero rows only compiles. Raises
    InvalidInput for more than 2^30 tiles, each of up to 4096 elements.
    """
    word, longest = rows.word, rows.longest
    constants = _constants(word, longest, to_blocks=to_blocks)
    chunks = triton.cdiv(longest, constants["tile_columns"] * min(word, 8))
    tiles = triton.cdiv(rows.rows, constants["tile_rows"]) * rows.count * chunks
    if tiles > _TILES_MAX:
        raise InvalidInput(
            f"rows: {rows.rows} rows of {rows.count} regions are {tiles} tiles; copy at most {_TILES_MAX} at once"
        )
    _move_kernel[(programs,)](
        rows.staging - rows.column, rows.row_bytes, rows.regions + 32 * rows.first, rows.count, rows.blocks, rows.rows,
        chunks, tiles, **constants, num_warps=_WARPS,
    )


def _constants(word: int, longest: int, *, to_blocks: bool) -> dict[str, Any]:
    """Return the compile-time constants of the kernel. A tile is many short rows, or a chunk of one long row."""
    columns = min(_TILE, int(triton.next_power_of_2(longest // min(word, 8))))
    return {
        "element": _ELEMENTS[word], "word": word, "vector": max(1, word // 8), "tile_rows": _TILE // columns,
        "tile_columns": columns, "to_blocks": to_blocks,
    }
