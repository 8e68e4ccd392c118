"""Seeds of random tests: printed by each run, replayed with TEST_SEED, multiplied by SOAK_FACTOR."""

from __future__ import annotations

import os
import random

# True in a soak, in which tests of all combinations of faults do not take a sample.
IS_SOAK = int(os.environ.get("SOAK_FACTOR", "1")) > 1


def seeds(count: int) -> list[int]:
    """Return `count` seeds (times SOAK_FACTOR), or the one in TEST_SEED. As parameters of tests, pytest prints them."""
    if "TEST_SEED" in os.environ:
        return [int(os.environ["TEST_SEED"])]
    return list(range(count * int(os.environ.get("SOAK_FACTOR", "1"))))


def fuzz_seed() -> int:
    """Return and print the seed of a fuzzer: TEST_SEED, or 0, or with a SOAK_FACTOR above 1 a new one in each run."""
    new = random.SystemRandom().randrange(2**31) if IS_SOAK else 0
    seed = int(os.environ.get("TEST_SEED", new))
    print(f"TEST_SEED={seed} replays this")
    return seed


def rng(seed: int) -> random.Random:
    """Return the random numbers of one seed."""
    return random.Random(seed)
