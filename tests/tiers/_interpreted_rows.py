"""Runs the kernel that copies rows on the CPU, in Triton's interpreter, against memmove.

    TRITON_INTERPRET=1 python -m tests.tiers._interpreted_rows SEED

It runs in a separate process, for the reason in `_interpreted_slots`. A difference ends it with a traceback.
"""

from __future__ import annotations

import sys

from hicache.tiers import rows_triton
from hicache.tiers.runtime import WORDS

from ._rows import compare, require_far, require_nothing

if __name__ == "__main__":
    compare(rows_triton, int(sys.argv[1]), WORDS)
    require_nothing(rows_triton)
    require_far(rows_triton)
    print("all equal")
