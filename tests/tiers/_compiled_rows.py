"""Compiles the kernel that copies rows for a GPU, without a GPU, and checks the compiled code.

    TRITON_CACHE_DIR=DIR python -m tests.tiers._compiled_rows

It runs in a separate process, for the reason in `_interpreted_slots`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from hicache.tiers import rows_triton
from hicache.tiers.runtime import WORDS

from ._compiled_slots import compile_for_gpu

KERNEL: Any = rows_triton._move_kernel
NUMBERS = [param.name for param in KERNEL.params if not param.is_constexpr]


def signature(numbers: list[int], constants: dict[str, Any]) -> dict[str, str]:
    """Return the signature under which a launch on a GPU compiles the kernel or finds it compiled: types only, no
    values."""
    bind = create_function_from_signature(KERNEL.signature, KERNEL.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, types, _ = bind(*numbers, **constants)
    found = dict(zip([param.name for param in KERNEL.params], types, strict=True))
    assert all(found[name][1] is None for name in NUMBERS), found
    return {name: found[name][0] for name in NUMBERS}


def require_wide(word: int, longest: int, *, to_blocks: bool) -> None:
    """Raise AssertionError unless rows are moved by words of that size, with all loads before the first store."""
    constants = rows_triton._constants(word, longest, to_blocks=to_blocks)
    types = signature([1] * len(NUMBERS), constants)
    assert types == signature([(1 << 31) - 16] * len(NUMBERS), constants)
    assert {types[name] for name in ("staging", "row_bytes", "regions", "blocks")} == {"i64"}
    ptx = compile_for_gpu(KERNEL, types, constants, num_warps=rows_triton._WARPS)
    accesses = re.findall(r"\b((?:ld|st)\.\w+(?:\.v\d)?\.b\d+)", ptx)
    words = 4096 // max(1, word // 8) // 256  # words of a tile per thread
    access = {16: "global.v2.b64"}.get(word, f"global.b{8 * word}")
    assert Counter(accesses)["st." + access] == words, accesses
    assert accesses[-2 * words :] == ["ld." + access] * words + ["st." + access] * words, accesses
    assert ".local" not in ptx, "a tile is kept in local memory"


def main() -> None:
    """Check both directions with each word: chunks of long rows, many rows at a time, and rows of one word."""
    for to_blocks in (False, True):
        for word in WORDS:
            for longest in (64 * 1152, 656, 16):
                require_wide(word, longest, to_blocks=to_blocks)
    print("compiled")


if __name__ == "__main__":
    main()
