"""Copies between blocks and staging rows with memmove: the reference for `hicache.tiers.rows_triton`.

`move_rows` takes addresses of host memory, so it needs no device. It rejects arguments with which the kernel would read
or write wrong bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.tiers.blocks import EngineBlocks
from hicache.tiers.runtime import Rows

GUARD = 256  # bytes between tensors that no copy may change
CAPACITY_BYTES = 4 << 20


class RowKernels(Protocol):
    """`hicache.tiers.rows_triton`, or a double of it."""

    @property
    def move_rows(self) -> Callable[..., None]: ...


def move_rows(some: Rows, *, programs: int, to_blocks: bool) -> None:
    """Copy as `rows_triton.move_rows`."""
    assert programs > 0
    table = [_int64(some.regions + 32 * entry, 4) for entry in range(some.first, some.first + some.count)]
    ids = _int64(some.blocks, some.rows)
    assert len(set(ids)) == some.rows and all(block >= 0 for block in ids), ids
    for address, stride, begin, length in table:
        assert 0 < length <= some.longest, (length, some.longest)
        assert 0 <= begin - some.column <= some.row_bytes - length, (begin, length, some)
        values = (some.staging, some.row_bytes, address, stride, begin - some.column, length)
        assert not any(value % some.word for value in values), (some.word, values)
        for row, block in enumerate(ids):
            inside, outside = some.staging + row * some.row_bytes + begin - some.column, address + block * stride
            target, source = (outside, inside) if to_blocks else (inside, outside)
            ctypes.memmove(target, source, length)


def _int64(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


class Arena:
    """One piece of memory for all tensors of a case, so that one comparison detects every written byte."""

    def __init__(self, begin: int) -> None:
        self.memory = torch.empty(CAPACITY_BYTES, dtype=torch.uint8)
        self._end = begin

    def take(self, *shape: int) -> torch.Tensor:
        """Return the next bytes as a tensor, `begin` bytes off an aligned address, with a guard before and after it."""
        count = torch.Size(shape).numel()
        begin, self._end = self._end + GUARD, self._end + 2 * GUARD + (count + 15) // 16 * 16
        return self.memory[begin : begin + count].view(shape)

    def offset(self, tensor: torch.Tensor) -> int:
        """Return the offset of a tensor from `take`, or of a view of it."""
        return tensor.data_ptr() - self.memory.data_ptr()

    def filled(self, seed: int) -> torch.Tensor:
        """Return all memory taken so far, as random bytes."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(256, (self._end,), dtype=torch.uint8, generator=generator)


def blocks_of(page: int) -> int:
    """Return the number of blocks of an engine: with pages of one token, more than fit into a tile."""
    return 70 if page == 1 else 5


def _unequal(arena: Arena, page: int) -> EngineBlocks:
    """Return layers of one and two regions of any length, with gaps between the blocks."""
    pieces = [[4096, 1024], [23], [3001 * page], [page, 16 * page]]
    return EngineBlocks([[arena.take(blocks_of(page), size + 80)[:, :size] for size in layer] for layer in pieces])


def _two_first(arena: Arena, page: int) -> EngineBlocks:
    layers = [arena.take(2, blocks_of(page), page, 3, 64) for _ in range(3)]
    return EngineBlocks([[layer[0], layer[1]] for layer in layers])


def _blocks_first(arena: Arena, page: int) -> EngineBlocks:
    memory = arena.take(blocks_of(page), 4, 2, page, 2, 64)
    return EngineBlocks([[memory[:, layer]] for layer in range(4)])


def _keys_and_values(arena: Arena, page: int) -> EngineBlocks:
    pairs = [[arena.take(blocks_of(page) * page, 2, 128), arena.take(blocks_of(page) * page, 2, 128)] for _ in range(3)]
    return EngineBlocks(pairs, slots_per_block=page)


def _one_region(token_bytes: int) -> Callable[[Arena, int], EngineBlocks]:
    return lambda arena, page: EngineBlocks([[arena.take(blocks_of(page), page, token_bytes)] for _ in range(3)])


# Each creates the blocks of an engine for a number of tokens per block.
LAYOUTS: dict[str, Callable[[Arena, int], EngineBlocks]] = {
    "[blocks, 2, block, ...]": _one_region(2 * 4 * 64 * 2),
    "[blocks, 2, block, ...] in fp8": _one_region(2 * 4 * 24),
    "[slots, ...] of K and of V": _keys_and_values,
    "[2, blocks, block, ...]": _two_first,
    "[blocks, layers, 2, block, ...]": _blocks_first,
    "a latent of 1152 bytes": _one_region(1152),
    "a latent in fp8": _one_region(576),
    "a latent with scales": _one_region(656),
    "unequal layers": _unequal,
}
PAGES = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class Copy:
    """The arguments of one call, with offsets into an arena as addresses."""

    staging: int
    row_bytes: int
    table: list[list[int]]
    first: int
    count: int
    blocks: list[int]
    column: int
    longest: int

    @property
    def aligned(self) -> list[int]:
        """Return the numbers that a word must divide."""
        used = self.table[self.first : self.first + self.count]
        return [self.staging, self.row_bytes, self.column, *(number for entry in used for number in entry)]

    def run(
        self, move: Callable[..., None], memory: torch.Tensor, word: int, programs: int, *, to_blocks: bool
    ) -> torch.Tensor:
        """Return a copy of `memory` after the call. Table and ids also contain entries that must not be used."""
        arena = memory.clone()
        begin = arena.data_ptr()
        table = torch.tensor([[begin + entry[0], *entry[1:]] for entry in self.table], device=memory.device)
        blocks = torch.tensor([*self.blocks, 1 << 40], device=memory.device)
        rows = Rows(
            begin + self.staging, self.row_bytes, table.data_ptr(), self.first, self.count, self.column,
            blocks.data_ptr(), len(self.blocks), word, self.longest,
        )
        move(rows, programs=programs, to_blocks=to_blocks)
        return arena.cpu()


def random_copy(layout: str, page: int, numbers: random.Random, *, begin: int = 0) -> tuple[Copy, torch.Tensor]:
    """Return a copy of some rows of a random run of layers, and its random memory, in which all tensors are `begin`
    bytes off a multiple of 16."""
    arena = Arena(begin)
    layers = LAYOUTS[layout](arena, page).layers
    table, ends, column = [], [0], 0
    for layer in layers:
        for region in layer:
            table.append([arena.offset(region), region.stride(0), column, region.shape[1]])
            column += region.shape[1]
        ends.append(len(table))
    lower, upper = sorted(numbers.sample(range(len(layers) + 1), 2))
    used = table[ends[lower] : ends[upper]]
    row_bytes = sum(entry[3] for entry in used)
    blocks = numbers.sample(range(blocks_of(page)), numbers.choice([1, 2, blocks_of(page)]))
    staging = arena.offset(arena.take(len(blocks), row_bytes))
    arena.take(GUARD)
    longest = max(entry[3] for entry in used) * numbers.choice([1, 1, 2])
    copy = Copy(staging, row_bytes, table, ends[lower], len(used), blocks, used[0][2], longest)
    return copy, arena.filled(numbers.randrange(1 << 32))


def require_equal(
    kernels: RowKernels, copy: Copy, memory: torch.Tensor, word: int, programs: int, device: str = "cpu"
) -> None:
    """Raise AssertionError if one byte of the memory differs after `kernels` and after `move_rows`."""
    for to_blocks in (True, False):
        moved = copy.run(kernels.move_rows, memory.to(device), word, programs, to_blocks=to_blocks)
        wrong = (moved != copy.run(move_rows, memory, 1, 1, to_blocks=to_blocks)).nonzero()
        assert not len(wrong), f"{to_blocks=}, word {word}, {programs} programs: byte {wrong[0].item()} of {copy}"


def require_round_trip(kernels: RowKernels, copy: Copy, memory: torch.Tensor, word: int, device: str = "cpu") -> None:
    """Raise AssertionError unless scattered rows are gathered again into overwritten staging."""
    staged = slice(copy.staging, copy.staging + len(copy.blocks) * copy.row_bytes)
    scattered = copy.run(kernels.move_rows, memory.to(device), word, 3, to_blocks=True)
    scattered[staged] = 0
    gathered = copy.run(kernels.move_rows, scattered.to(device), word, 3, to_blocks=False)
    assert gathered[staged].equal(memory[staged]), f"word {word}: {copy}"


def cases(numbers: random.Random, words: tuple[int, ...]) -> Iterator[tuple[Copy, torch.Tensor, int]]:
    """Iterate over each layout with each page size, and each word that divides it; also with memory that is aligned to
    less than a word."""
    for layout in LAYOUTS:
        for page in PAGES:
            for begin in (0, numbers.choice([1, 2, 4, 8])):
                copy, memory = random_copy(layout, page, numbers, begin=begin)
                fitting = [word for word in words if not any(number % word for number in copy.aligned)]
                for word in fitting if not begin else fitting[:1]:
                    yield copy, memory, word


def compare(kernels: RowKernels, seed: int, words: tuple[int, ...], device: str = "cpu") -> None:
    """Compare all `cases`, with a random number of programs, which may exceed the number of tiles."""
    numbers = random.Random(seed)
    seen = set()
    for copy, memory, word in cases(numbers, words):
        require_equal(kernels, copy, memory, word, numbers.choice([1, 2, 7, 40]), device)
        if word not in seen:
            require_round_trip(kernels, copy, memory, word, device)
        seen.add(word)
    assert seen == set(words)


def require_nothing(kernels: RowKernels, device: str = "cpu") -> None:
    """Raise AssertionError if a copy of zero rows writes anything."""
    copy, memory = random_copy("a latent of 1152 bytes", 16, random.Random(0))
    for to_blocks in (True, False):
        moved = replace(copy, blocks=[]).run(kernels.move_rows, memory.to(device), 16, 3, to_blocks=to_blocks)
        assert moved.equal(memory)


def require_far(kernels: RowKernels) -> None:
    """Raise AssertionError if a copy is wrong for offsets of more than 32 bits. Uses two sparse files."""
    far, length = 5 << 30, 2000
    outside, staging = _sparse(far + 4096), _sparse(far + 4096)
    staging[:length], staging[far : far + length] = 1, 2
    table, blocks = np.array([outside.ctypes.data, far, 0, length]), np.array([1, 0])
    rows = Rows(staging.ctypes.data, far, table.ctypes.data, 0, 1, 0, blocks.ctypes.data, 2, 1, length)
    kernels.move_rows(rows, programs=2, to_blocks=True)
    assert (outside[:length] == 2).all() and (outside[far : far + length] == 1).all()
    staging[:length], staging[far : far + length] = 0, 0
    kernels.move_rows(rows, programs=2, to_blocks=False)
    assert (staging[:length] == 1).all() and (staging[far : far + length] == 2).all()
    assert not staging[length:4096].any() and not outside[length:4096].any()


def _sparse(length: int) -> npt.NDArray[np.uint8]:
    with tempfile.TemporaryFile() as file:
        file.truncate(length)
        return np.frombuffer(mmap.mmap(file.fileno(), length), np.uint8)
