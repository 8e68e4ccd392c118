"""Hostile clients for some minutes, beside a well-behaved one: the daemon's memory, descriptors and threads stay flat.

    python -m tests.daemon.hostile --minutes 10 --seed 1

Rounds of all attacks (see `attacks`) against one daemon. The first fifth of the time is the warm-up. After it resident
memory stays within GROWTH_MAX of the most that the warm-up saw, descriptors and threads within SLACK of it. Exit code 0
if that holds, every page of the client beside was right and came, and the daemon ends with code 0 on SIGTERM.
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
from .process import Daemon, Held

GROWTH_MAX = 1.1
# The daemon's thread pools grow until they have their size, and its client beside opens connections as it needs them.
SLACK = 40
WARM_UP = 0.2


@dataclass(slots=True)
class Outcome:
    """What `run` saw."""

    rounds: int = 0
    answers: dict[str, Answers] = field(default_factory=dict)
    warm: Held = field(default_factory=lambda: Held(0, 0, 0))
    most: Held = field(default_factory=lambda: Held(0, 0, 0))
    served: int = 0
    failures: list[str] = field(default_factory=list)
    p50_s: float = 0.0
    p99_s: float = 0.0
    exit_code: int = -1
    exit_s: float = 0.0

    def faults(self) -> list[str]:
        """Return what is not as it has to be."""
        found = list(self.failures)
        if self.most.resident_bytes > self.warm.resident_bytes * GROWTH_MAX:
            found.append(f"memory grew from {self.warm} to {self.most}")
        if self.most.descriptors > self.warm.descriptors + SLACK or self.most.threads > self.warm.threads + SLACK:
            found.append(f"descriptors or threads grew from {self.warm} to {self.most}")
        if self.exit_code != 0:
            found.append(f"the daemon ended with code {self.exit_code}")
        if not self.served:
            found.append("the client beside was not served")
        return found


def _most(one: Held, other: Held) -> Held:
    return Held(
        max(one.resident_bytes, other.resident_bytes), max(one.descriptors, other.descriptors),
        max(one.threads, other.threads),
    )  # fmt: skip


def run(folder: Path, seed: int, goes_on: Callable[[int], bool], is_warm: Callable[[int], bool]) -> Outcome:
    """Run rounds while `goes_on` says so of their number; those for which `is_warm` is False are the warm-up."""
    outcome = Outcome()
    with Daemon(folder, **BOUNDS) as daemon:
        with Beside(daemon, str(seed)) as beside:
            while goes_on(outcome.rounds):
                dice = random.Random(seed + outcome.rounds)
                open_namespace(daemon)
                for attack in ATTACKS:
                    answers = attack(daemon, dice)
                    outcome.answers[attack.__name__] = outcome.answers.get(attack.__name__, Counter()) + answers
                held = daemon.held()
                if not is_warm(outcome.rounds):
                    outcome.warm = _most(outcome.warm, held)
                outcome.most = _most(outcome.most, held)
                outcome.rounds += 1
        outcome.served, outcome.failures = beside.served, beside.failures
        outcome.p50_s, outcome.p99_s = beside.latency_s(0.5), beside.latency_s(0.99)
        outcome.exit_code, outcome.exit_s = daemon.end()
    return outcome


def main() -> int:
    """Print what was seen."""
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
        )  # fmt: skip
    for name, answers in outcome.answers.items():
        print(f"{name:18} {answers.total():8}  " + "  ".join(f"{code}: {n}" for code, n in sorted(answers.items())))
    print(f"{outcome.rounds} rounds; warm {outcome.warm}; most {outcome.most}")
    print(
        f"beside: {outcome.served} batches served, {len(outcome.failures)} not; "
        f"p50 {outcome.p50_s * 1e3:.1f} ms, p99 {outcome.p99_s * 1e3:.1f} ms; ended in {outcome.exit_s:.2f} s"
    )
    faults = outcome.faults()
    for fault in faults[:20]:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
