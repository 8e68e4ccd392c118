"""Compiles the Triton kernels for a GPU, without a GPU: the compiler may reject code that the interpreter accepts.

    TRITON_CACHE_DIR=DIR python -m tests.tiers._compiled_slots

It runs in a separate process, for the reason in `_interpreted_slots`.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hicache.tiers import slots_triton


def compile_for_gpu(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """Return the kernel as PTX for compute capability 9.0."""
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def main() -> None:
    """Compile both kernels, for both types of `last_loc`."""
    for loc in ("*i64", "*i32"):
        extend = {"requests": "*i64", "last_loc": loc, "pages": "*i64", "out": "*i64"}
        for page_size in (1, 48, 64):
            assert compile_for_gpu(slots_triton._extend_kernel, extend, {"page_size": page_size, "block": 1024})
        decode = {"first_slots": "*i64", "last_loc": loc, "out": "*i64", "count": "i32"}
        assert compile_for_gpu(slots_triton._decode_kernel, decode, {"block": 1024})
    print("compiled")


if __name__ == "__main__":
    main()
