"""The kernels of the staged path: right bytes in Triton's interpreter, and compiled for a GPU that need not be here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.test_token_allocator import run_child

pytestmark = pytest.mark.long


def test_rows_are_moved_between_staging_and_the_blocks_of_every_layout(repository: Path) -> None:
    assert run_child(repository, "_interpreted_rows", TRITON_INTERPRET="1") == "all equal\n"


def test_the_kernels_of_staging_compile_for_a_gpu_with_wide_loads_and_no_memory_of_their_own(
    repository: Path, tmp_path: Path
) -> None:
    printed = run_child(repository, "_compiled_rows", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert printed == "compiled\n"
