"""Run hostile clients for some minutes beside a well-behaved one. The daemon's memory, descriptors and threads must not
grow.

    python -m tests.daemon.hostile --minutes 10 --seed 1

The command runs all attacks (see `attacks`) in rounds against one daemon. The first fifth of the time is the warm-up.
After it, resident memory is at most GROWTH_MAX times the maximum of the warm-up; descriptors and threads are at most
SLACK above theirs. The exit code is 0 if these limits hold, the well-behaved client got every page right, and the
daemon ends with code 0 on SIGTERM.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .attacks import ATTACKS, BOUNDS, Answers, open_namespace
from .beside import Beside
from .process import Daemon, Resources

GROWTH_MAX = 1.1
# The daemon's thread pools grow to their size, and the well-behaved client opens connections on demand.
SLACK = 40
WARM_UP = 0.2


@dataclass(slots=True)
class Outcome:
    """The result of `run`. `warm` and `most` are the maxima during and after the warm-up."""

    rounds: int = 0
    answers: dict[str, Answers] = field(default_factory=dict)
    warm: Resources = field(default_factory=lambda: Resources(0, 0, 0))
    most: Resources = field(default_factory=lambda: Resources(0, 0, 0))
    served: int = 0
    failures: list[str] = field(default_factory=list)
    p50_s: float = 0.0
    p99_s: float = 0.0
    exit_code: int = -1
    exit_s: float = 0.0

    def faults(self) -> list[str]:
        """Return a description of each violated condition."""
        found = list(self.failures)
        if self.most.resident_bytes > self.warm.resident_bytes * GROWTH_MAX:
            found.append(f"memory grew from {self.warm} to {self.most}")
        if self.most.descriptors > self.warm.descriptors + SLACK or self.most.threads > self.warm.threads + SLACK:
            found.append(f"descriptors or threads grew from {self.warm} to {self.most}")
        if self.exit_code != 0:
            found.append(f"the daemon ended with code {self.exit_code}")
        if not self.served:
            found.append("the well-behaved client was not served")
        return found


def _most(one: Resources, other: Resources) -> Resources:
    return Resources(
        max(one.resident_bytes, other.resident_bytes), max(one.descriptors, other.descriptors),
        max(one.threads, other.threads),
    )


def run(folder: Path, seed: int, goes_on: Callable[[int], bool], is_warm: Callable[[int], bool]) -> Outcome:
    """Run rounds while `goes_on(number of the round)` is True. Rounds with `is_warm(number)` False are the warm-up."""
    outcome = Outcome()
    with Daemon(folder, **BOUNDS) as daemon:
        with Beside(daemon) as beside:
            while goes_on(outcome.rounds):
                dice = random.Random(seed + outcome.rounds)
                open_namespace(daemon)
                for attack in ATTACKS:
                    answers = attack(daemon, dice)
                    outcome.answers[attack.__name__] = outcome.answers.get(attack.__name__, Counter()) + answers
                resources = daemon.resources()
                if not is_warm(outcome.rounds):
                    outcome.warm = _most(outcome.warm, resources)
                outcome.most = _most(outcome.most, resources)
                outcome.rounds += 1
        outcome.served, outcome.failures = beside.served, beside.failures
        outcome.p50_s, outcome.p99_s = beside.latency_s(0.5), beside.latency_s(0.99)
        outcome.exit_code, outcome.exit_s = daemon.end()
    return outcome


def main() -> int:
    """Parse the arguments, run, and print the result. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began_s, total_s = time.monotonic(), options.minutes * 60

    def elapsed() -> float:
        return time.monotonic() - began_s

    with tempfile.TemporaryDirectory(prefix="hicache-hostile-") as folder:
        outcome = run(
            Path(folder) / "daemon", options.seed, lambda _: elapsed() < total_s,
            lambda number: number > 0 and elapsed() > WARM_UP * total_s,
        )
    for name, answers in outcome.answers.items():
        print(f"{name:18} {answers.total():8}  " + "  ".join(f"{code}: {n}" for code, n in sorted(answers.items())))
    print(f"{outcome.rounds} rounds; warm {outcome.warm}; most {outcome.most}")
    print(
        f"well-behaved client: {outcome.served} batches served, {len(outcome.failures)} not; "
        f"p50 {outcome.p50_s * 1e3:.1f} ms, p99 {outcome.p99_s * 1e3:.1f} ms; ended in {outcome.exit_s:.2f} s"
    )
    faults = outcome.faults()
    for fault in faults[:20]:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
