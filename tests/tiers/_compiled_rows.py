"""Compiles the kernels of staging for a GPU, without one, and reads what they are made of.

    TRITON_CACHE_DIR=DIR python -m tests.tiers._compiled_rows
"""

from __future__ import annotations

from hicache.tiers import rows_triton

from ._compiled_slots import compile_for_gpu

# As a launch passes them: addresses have 64 bits, the other numbers 32.
TYPES = {
    "staging": "i64", "row_bytes": "i32", "regions": "i64", "first": "i32", "count": "i32", "column": "i32",
    "blocks": "i64", "rows": "i32", "chunks": "i32",
}  # fmt: skip


def main() -> None:
    """Both kernels for each word."""
    for word, words in rows_triton._TYPES.items():
        for scatters in (False, True):
            for block in (rows_triton.BLOCK_MIN, rows_triton.BLOCK_MAX):
                constants = {"words": words, "word": word, "block": block, "scatters": scatters}
                ptx = compile_for_gpu(rows_triton._move_kernel, TYPES, constants)
                assert f"ld.global.b{8 * word}" in ptx, "a load for each word"
                assert ".local" not in ptx, "a kernel of copies needs no memory of its own"
    print("compiled")


if __name__ == "__main__":
    main()
