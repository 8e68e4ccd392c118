"""Rows of bytes between staging and the blocks of an engine, within the device: one launch for any number of regions.

A few programs go over all work, so that the number of multiprocessors is bounded whatever there is to move. Addresses
are numbers: the memory belongs to whoever has made the table of `Rows`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .runtime import Rows

# Words that a program moves at a time: at most 16 for each of its 256 threads, so that several loads are in flight.
BLOCK_MIN, BLOCK_MAX = 256, 4096
_WARPS = 8
_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# A variant for each combination of odd and even numbers would be compiled otherwise.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["staging", "row_bytes", "regions", "first", "count", "column", "blocks", "rows", "chunks"]
)
def _move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917  what a launch passes
    staging, row_bytes, regions, first, count, column, blocks, rows, chunks,
    words: tl.constexpr, word: tl.constexpr, block: tl.constexpr, scatters: tl.constexpr,
):  # fmt: skip
    """One program per multiprocessor that may be used. `words` is the type of a word of `word` bytes."""
    table = regions.to(tl.int64).to(tl.pointer_type(tl.int64))
    ids = blocks.to(tl.int64).to(tl.pointer_type(tl.int64))
    for item in range(tl.program_id(0), rows * count * chunks, tl.num_programs(0)):
        row = item // (count * chunks)
        entry = table + (first + item // chunks % count) * 4
        offset = item % chunks * block + tl.arange(0, block)
        inside = offset < tl.load(entry + 3) // word
        there = tl.load(entry) + tl.load(ids + row) * tl.load(entry + 1)
        here = staging.to(tl.int64) + row.to(tl.int64) * row_bytes + tl.load(entry + 2) - column
        there_at = there.to(tl.pointer_type(words)) + offset
        here_at = here.to(tl.pointer_type(words)) + offset
        if scatters:
            tl.store(there_at, tl.load(here_at, mask=inside), mask=inside)
        else:
            tl.store(here_at, tl.load(there_at, mask=inside), mask=inside)


def gather_rows(rows: Rows, programs: int) -> None:
    """Queue a copy of blocks to staging on torch's current stream of the current device."""
    _move(rows, programs, scatters=False)


def scatter_rows(rows: Rows, programs: int) -> None:
    """Queue a copy of staging to blocks. As `gather_rows` otherwise."""
    _move(rows, programs, scatters=True)


def _move(rows: Rows, programs: int, *, scatters: bool) -> None:
    words = rows.longest // rows.word
    block = min(BLOCK_MAX, max(BLOCK_MIN, triton.next_power_of_2(words)))
    chunks = triton.cdiv(words, block)
    launch: Any = _move_kernel[(min(programs, rows.rows * rows.count * chunks),)]
    launch(
        rows.staging, rows.row_bytes, rows.regions, rows.first, rows.count, rows.column, rows.blocks, rows.rows, chunks,
        words=_TYPES[rows.word], word=rows.word, block=block, scatters=scatters, num_warps=_WARPS,
    )  # fmt: skip
