"""Copies between the blocks of an engine and staging rows: the kernel against memmove, and memmove against tensors."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hicache.errors import InvalidInput
from hicache.tiers import rows_triton
from hicache.tiers.runtime import WORDS, Rows, word_bytes
from tests.seeds import rng, seeds

from . import _rows
from ._children import run_child
from ._rows import LAYOUTS, PAGES, compare, random_copy, require_equal, require_far, require_round_trip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", seeds(3))
def test_the_reference_copies_each_region_to_its_columns(layout: str, seed: int) -> None:
    copy, memory = random_copy(layout, PAGES[seed % 3], rng(seed))
    expected = memory.clone()
    rows = expected[copy.staging :].as_strided((len(copy.blocks), copy.row_bytes), (copy.row_bytes, 1), copy.staging)
    for offset, stride, column, length in copy.table[copy.first : copy.first + copy.count]:
        region = expected.as_strided((max(copy.blocks) + 1, length), (stride, 1), offset)
        region[copy.blocks] = rows[:, column - copy.column :][:, :length]
    assert copy.run(_rows.move_rows, memory, 1, 1, to_blocks=True).equal(expected)
    assert not expected.equal(memory)
    require_round_trip(_rows, copy, memory, 1)


def test_the_reference_handles_offsets_beyond_32_bits() -> None:
    require_far(_rows)


class ShiftedColumn:
    """Kernels with a mistake: a region begins one byte too late in a staging row."""

    @staticmethod
    def move_rows(rows: Rows, *, programs: int, to_blocks: bool) -> None:
        _rows.move_rows(replace(rows, staging=rows.staging + to_blocks), programs=programs, to_blocks=to_blocks)


class LongRow:
    """Kernels with a mistake: one byte too many is written to a staging row."""

    @staticmethod
    def move_rows(rows: Rows, *, programs: int, to_blocks: bool) -> None:
        _rows.move_rows(rows, programs=programs, to_blocks=to_blocks)
        if not to_blocks:
            ctypes.c_uint8.from_address(rows.staging + rows.row_bytes * rows.rows).value ^= 1


@pytest.mark.parametrize("kernels", [ShiftedColumn(), LongRow()], ids=["a wrong column", "a row too long"])
def test_the_comparison_finds_one_wrong_byte(kernels: _rows.RowKernels) -> None:
    copy, memory = random_copy("unequal layers", 16, random.Random(0))
    require_equal(_rows, copy, memory, 1, 1)
    with pytest.raises(AssertionError):
        require_equal(kernels, copy, memory, 1, 1)


def test_the_round_trip_needs_every_byte_of_staging() -> None:
    copy, memory = random_copy("a latent with scales", 16, random.Random(0))
    require_round_trip(_rows, copy, memory, 16)
    with pytest.raises(AssertionError):
        require_round_trip(ShiftedColumn(), copy, memory, 1)


@pytest.mark.parametrize(
    "wrong", [{"longest": 1151}, {"column": 1}, {"row_bytes": 1136}, {"blocks": [2, 2]}, {"blocks": [-1]}]
)
def test_the_reference_rejects_arguments_that_the_kernel_would_copy_wrongly(wrong: dict[str, object]) -> None:
    copy, memory = random_copy("a latent of 1152 bytes", 1, random.Random(0))
    copy = replace(copy, first=0, count=1, column=0, row_bytes=1152, longest=1152, blocks=[1, 2])
    copy.run(_rows.move_rows, memory, 16, 1, to_blocks=False)
    with pytest.raises(AssertionError):
        replace(copy, **wrong).run(_rows.move_rows, memory, 16, 1, to_blocks=False)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        copy.run(_rows.move_rows, memory, 512, 1, to_blocks=False)


def test_the_word_is_the_largest_that_divides_everything() -> None:
    assert word_bytes([1 << 40, 4096, 0, 656, 1152]) == 16
    assert [word_bytes([4096, odd]) for odd in (24, 20, 6, 23)] == [8, 4, 2, 1]
    assert word_bytes(number for number in (48, 32)) == 16
    assert word_bytes([]) == 16


def test_more_tiles_than_the_kernel_can_count_are_rejected_before_any_copy() -> None:
    with pytest.raises(InvalidInput, match="1073745920 tiles"):
        rows_triton.move_rows(
            Rows(16, 1 << 17, 16, 0, 1 << 10, 0, 16, (1 << 18) + 1, word=16, longest=1 << 17), programs=1,
            to_blocks=False,
        )


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(1))
def test_triton_copies_the_same_bytes_in_its_interpreter(repository: Path, seed: int) -> None:
    assert run_child(repository, "_interpreted_rows", str(seed), TRITON_INTERPRET="1") == "all equal\n"


@pytest.mark.long
def test_the_kernel_compiles_once_for_all_values_and_moves_whole_words(
    repository: Path, tmp_path: Path
) -> None:
    printed = run_child(repository, "_compiled_rows", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert printed == "compiled\n"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", seeds(4))
def test_triton_copies_the_same_bytes_on_a_gpu(seed: int) -> None:
    compare(rows_triton, seed, WORDS, "cuda")
