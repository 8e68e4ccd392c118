"""Copies between blocks of an engine and rows of staging memory, as one Triton launch for any number of regions.

A staging row holds a run of layers of one block: the pieces of its regions side by side, as in a host frame. A table
in device memory says where each region is, so the same compiled kernel copies one layer or all of them. The tests
compare the kernel with a loop of memmove, through Triton's interpreter, which runs it without a GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..errors import InvalidInput

# What a word of `hicache.tiers.runtime.WORDS` is made of: one of 16 bytes is two integers.
_ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

# Elements that a program copies at a time, 16 for each thread: 32 KiB in flight with elements of 8 bytes. At about 1 us
# for a load and a store, which is an estimate, two or three programs keep up with a link of 60 GB/s to the host.
_TILE = 4096
_WARPS = 8
# The kernel counts tiles in 32 bits, which a GPU divides several times faster than 64, and may step past the last one.
_TILES_MAX = 1 << 30


# All numbers have one type and none is specialised: Triton compiles once for each combination of the constexprs.
@triton.jit(do_not_specialize=["staging", "row_bytes", "regions", "count", "blocks", "rows", "chunks", "tiles"])
def _move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - a kernel takes no structures
    staging: tl.int64, row_bytes: tl.int64, regions: tl.int64, count: tl.int32, blocks: tl.int64, rows: tl.int32,
    chunks: tl.int32, tiles: tl.int32, element: tl.constexpr, word: tl.constexpr, vector: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, to_blocks: tl.constexpr,
):  # fmt: skip
    """Each program copies every num_programs-th tile: some rows of one region, or a chunk of one row.

    All addresses, strides and lengths are multiples of `word` bytes, which are `vector` elements. The compiler widens
    loads only if it can see that: in the products with `vector`, and in the hints, which it takes for scalars alone.
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


def scatter_rows(  # noqa: PLR0913, PLR0917 - as many numbers describe a copy
    staging: int, row_bytes: int, regions: int, first: int, count: int, blocks: int, rows: int, *, column: int,
    word: int, programs: int, longest: int,
) -> None:  # fmt: skip
    """Queue a copy of staging row r to block `blocks[r]` of each region, on torch's current stream. Does not block.

    REQUIRES: addresses of memory of the current device, which stays allocated until the stream has passed the copy;
    block ids without duplicates, of blocks that the regions have.

    `staging`: address of uint8 `[rows, row_bytes]`. `blocks`: address of int64 `[rows]`. `regions`: address of int64
    `[n, 4]`, of which rows `first` to `first + count - 1` are used: address of block 0, bytes from one block to the
    next, the region's byte in a payload, bytes of a block in the region. A region begins in a staging row at its byte
    in the payload minus `column`.

    `word`: a size of `WORDS` that divides `row_bytes` and all of these addresses, strides, bytes and lengths.
    `longest`: bytes of a block in the longest region used; a larger number is right, but slower. `programs`: how many
    programs share the work, hence how many multiprocessors it occupies at most.

    The first call for a direction, a word and a length rounded up to a power of two compiles the kernel, which blocks;
    one with `rows=0` does just that. Raises InvalidInput for more than 2^30 tiles, each of up to 4096 elements.
    """
    _move(staging, row_bytes, regions, first, count, blocks, rows, column, word, programs, longest, to_blocks=True)


def gather_rows(  # noqa: PLR0913, PLR0917 - as many numbers describe a copy
    staging: int, row_bytes: int, regions: int, first: int, count: int, blocks: int, rows: int, *, column: int,
    word: int, programs: int, longest: int,
) -> None:  # fmt: skip
    """Queue a copy of block `blocks[r]` of each region to staging row r. All else is as `scatter_rows` says."""
    _move(staging, row_bytes, regions, first, count, blocks, rows, column, word, programs, longest, to_blocks=False)


def _constants(word: int, longest: int, *, to_blocks: bool) -> dict[str, Any]:
    """What the kernel is compiled for. A tile of short rows has many of them, one of long rows a chunk of one."""
    columns = min(_TILE, int(triton.next_power_of_2(longest // min(word, 8))))
    return {
        "element": _ELEMENTS[word], "word": word, "vector": max(1, word // 8), "tile_rows": _TILE // columns,
        "tile_columns": columns, "to_blocks": to_blocks,
    }  # fmt: skip


def _move(  # noqa: PLR0913, PLR0917 - as many numbers describe a copy
    staging: int, row_bytes: int, regions: int, first: int, count: int, blocks: int, rows: int, column: int,
    word: int, programs: int, longest: int, *, to_blocks: bool,
) -> None:  # fmt: skip
    constants = _constants(word, longest, to_blocks=to_blocks)
    chunks = triton.cdiv(longest, constants["tile_columns"] * min(word, 8))
    tiles = triton.cdiv(rows, constants["tile_rows"]) * count * chunks
    if tiles > _TILES_MAX:
        raise InvalidInput(f"rows: {rows} rows of {count} regions are {tiles} tiles; copy at most {_TILES_MAX} at once")
    _move_kernel[(programs,)](
        staging - column, row_bytes, regions + 32 * first, count, blocks, rows, chunks, tiles, **constants,
        num_warps=_WARPS,
    )  # fmt: skip
