"""Copies between blocks and staging rows with memmove: the reference for `hicache.tiers.rows_triton`.

`gather_rows` and `scatter_rows` take addresses of host memory, so the tests of the copy engine also use them in place
of a device. They reject arguments with which the kernel would read or write wrong bytes.
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

GUARD = 256  # bytes between tensors that no copy may change
CAPACITY_BYTES = 4 << 20


class RowKernels(Protocol):
    """`hicache.tiers.rows_triton`, or a double of it."""

    @property
    def gather_rows(self) -> Callable[..., None]: ...

    @property
    def scatter_rows(self) -> Callable[..., None]: ...


def move_rows(  # noqa: PLR0913, PLR0917 - the arguments of the kernel
    staging: int, row_bytes: int, regions: int, first: int, count: int, blocks: int, rows: int, *, column: int,
    word: int, programs: int, longest: int, to_blocks: bool,
) -> None:  # fmt: skip
    """Copy as `rows_triton.scatter_rows` if `to_blocks`, else as `rows_triton.gather_rows`."""
    assert programs > 0
    table = [_int64(regions + 32 * entry, 4) for entry in range(first, first + count)]
    ids = _int64(blocks, rows)
    assert len(set(ids)) == rows and all(block >= 0 for block in ids), ids
    for address, stride, begin, length in table:
        assert 0 < length <= longest, (length, longest)
        assert 0 <= begin - column <= row_bytes - length, (begin, column, length, row_bytes)
        values = (staging, row_bytes, address, stride, begin - column, length)
        assert not any(value % word for value in values), (word, values)
        for row, block in enumerate(ids):
            inside, outside = staging + row * row_bytes + begin - column, address + block * stride
            target, source = (outside, inside) if to_blocks else (inside, outside)
            ctypes.memmove(target, source, length)


def scatter_rows(*arguments: int, **numbers: int) -> None:
    """See `rows_triton.scatter_rows`."""
    move_rows(*arguments, **numbers, to_blocks=True)


def gather_rows(*arguments: int, **numbers: int) -> None:
    """See `rows_triton.gather_rows`."""
    move_rows(*arguments, **numbers, to_blocks=False)


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

    def run(self, move: Callable[..., None], memory: torch.Tensor, word: int, programs: int) -> torch.Tensor:
        """Return a copy of `memory` after the call. Table and ids also contain entries that must not be used."""
        arena = memory.clone()
        begin = arena.data_ptr()
        table = torch.tensor([[begin + entry[0], *entry[1:]] for entry in self.table], device=memory.device)
        blocks = torch.tensor([*self.blocks, 1 << 40], device=memory.device)
        move(
            begin + self.staging, self.row_bytes, table.data_ptr(), self.first, self.count, blocks.data_ptr(),
            len(self.blocks), column=self.column, word=word, programs=programs, longest=self.longest,
        )  # fmt: skip
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
    for move, expected in ((kernels.scatter_rows, scatter_rows), (kernels.gather_rows, gather_rows)):
        moved = copy.run(move, memory.to(device), word, programs)
        wrong = (moved != copy.run(expected, memory, 1, 1)).nonzero()
        assert not len(wrong), f"{move.__name__}, word {word}, {programs} programs: byte {wrong[0].item()} of {copy}"


def require_round_trip(kernels: RowKernels, copy: Copy, memory: torch.Tensor, word: int, device: str = "cpu") -> None:
    """Raise AssertionError unless scattered rows are gathered again into overwritten staging."""
    staged = slice(copy.staging, copy.staging + len(copy.blocks) * copy.row_bytes)
    scattered = copy.run(kernels.scatter_rows, memory.to(device), word, 3)
    scattered[staged] = 0
    gathered = copy.run(kernels.gather_rows, scattered.to(device), word, 3)
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
    for move in (kernels.scatter_rows, kernels.gather_rows):
        assert replace(copy, blocks=[]).run(move, memory.to(device), 16, 3).equal(memory)


def require_far(kernels: RowKernels) -> None:
    """Raise AssertionError if a copy is wrong for offsets of more than 32 bits. Uses two sparse files."""
    far, length = 5 << 30, 2000
    outside, staging = _sparse(far + 4096), _sparse(far + 4096)
    staging[:length], staging[far : far + length] = 1, 2
    table, blocks = np.array([outside.ctypes.data, far, 0, length]), np.array([1, 0])
    arguments = (staging.ctypes.data, far, table.ctypes.data, 0, 1, blocks.ctypes.data, 2)
    numbers = {"column": 0, "word": 1, "programs": 2, "longest": length}
    kernels.scatter_rows(*arguments, **numbers)
    assert (outside[:length] == 2).all() and (outside[far : far + length] == 1).all()
    staging[:length], staging[far : far + length] = 0, 0
    kernels.gather_rows(*arguments, **numbers)
    assert (staging[:length] == 1).all() and (staging[far : far + length] == 2).all()
    assert not staging[length:4096].any() and not outside[length:4096].any()


def _sparse(length: int) -> npt.NDArray[np.uint8]:
    with tempfile.TemporaryFile() as file:
        file.truncate(length)
        return np.frombuffer(mmap.mmap(file.fileno(), length), np.uint8)
