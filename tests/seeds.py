"""Seeds of random tests: printed by each run, replayed with TEST_SEED, multiplied by SOAK_FACTOR."""

from __future__ import annotations

import os
import random


def seeds(count: int) -> list[int]:
    """Return `count` seeds (times SOAK_FACTOR), or the one in TEST_SEED. As parameters of tests, pytest prints them."""
    if "TEST_SEED" in os.environ:
        return [int(os.environ["TEST_SEED"])]
    return list(range(count * int(os.environ.get("SOAK_FACTOR", "1"))))


def rng(seed: int) -> random.Random:
    """Return the random numbers of one seed."""
    return random.Random(seed)
