"""Runs the Triton kernels on the CPU, in Triton's interpreter, against the plain Python oracle.

    TRITON_INTERPRET=1 python -m tests.tiers._interpreted_slots [SEED]

It runs in a separate process, because Triton chooses between interpreter and compiler when a kernel's module is
imported. Without a seed: batches of extreme size. A difference ends it with a traceback.
"""

from __future__ import annotations

import sys

from hicache.tiers import slots_triton

from ._slots import compare, compare_extremes

CASES = 100


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare(slots_triton, int(sys.argv[1]), CASES)
    else:
        compare_extremes(slots_triton, requests=2500)
    print("all equal")
