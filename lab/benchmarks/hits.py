"""The share of possible hits that are hits: replays beside ideal caches of the same total size.

    python -m lab.benchmarks.hits [TRACE] [--only policies|sizes]

Replays are in virtual time, so each one has one answer, which the machine and its load do not change.

*Policies*: the default configuration of `hicache replay` (three small tiers, files) under each write policy. The
reference is the hit tokens of an ideal LRU (`lab/replay/ideal.py`). A selective policy should write fewer bytes.
*Sizes*: a large L1, and an L2 of twice, half and an eighth of its size, over an unlimited store in memory. The
reference is all tokens seen before, since such a store can keep them. Also with a slow store, which writes at a quarter
of the rate at which pages are computed. It cannot keep all pages, so its reference is a replay without storage: a slow
store must not cost hits of L1 and L2.

The trace is not part of this project; docs/traces.md says where to get it. The goals apply to the public conversation
trace. Without TRACE a synthetic trace is replayed, which has no goals. A ratio is ours : reference; goals are minimums,
and for bytes maximums.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from hicache.cli.model_shapes import PRESETS
from hicache.frame import frame_bytes
from hicache_lab.tier_names import TIERS

from ._table import Row, print_table

Report: TypeAlias = "dict[str, Any]"

PAGE_SIZE = 64
# By name: the settings, and the minimum share of an ideal LRU. Half of all possible hits are second uses. A policy that
# waits for the second use misses them, so it has no goal without a share of first uses. The others are below an ideal
# LRU because a page may be on several tiers.
POLICIES: dict[str, tuple[dict[str, Any], float | None]] = {
    "write_through": ({"write_policy": "write_through"}, 0.95),
    "write_back": ({"write_policy": "write_back"}, 0.95),
    "selective": ({"write_policy": "write_through_selective"}, None),
    "selective, 3/4 of first uses": (
        {"write_policy": "write_through_selective", "selective_first_share": 0.75}, 0.9
    ),
}
POLICY_REQUESTS = 2000
SIZE_REQUESTS = 600
DEVICE_TOKENS = 1 << 19
HOSTS = {"twice": 2 * DEVICE_TOKENS, "half": DEVICE_TOKENS // 2, "an eighth": DEVICE_TOKENS // 8}
SIZE_GOAL = 0.95
PREFILL_TOKENS_PER_S = 250_000
FRAME_BYTES = frame_bytes(replace(PRESETS["tiny"], page_size=PAGE_SIZE).payload_bytes)
# The store writes pages at a quarter of the rate at which they are computed.
SLOW = f"write={PREFILL_TOKENS_PER_S // PAGE_SIZE // 4 * FRAME_BYTES}B/s"


def replayed(
    trace: str | None, requests: int, speeds: str = "", *, virtual: bool = True, **entries: object
) -> Report:
    """Run one `hicache replay`, in virtual or in real time, in a separate process and return its report. `entries` are
    configuration entries, with two underscores for each dot. If it failed, the benchmark ends and prints its output."""
    settings = [f"{name.replace('__', '.')}={value}" for name, value in entries.items()]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        file = Path(folder) / "report.json"
        ended = subprocess.run(
            [sys.executable, "-m", "hicache", "replay", *([trace] if trace else []), "--requests", str(requests),
             *(["--virtual"] if virtual else []), *(["--storage", speeds] if speeds else []),
             "--prefill-rate", str(PREFILL_TOKENS_PER_S), "--json", str(file),
             *(part for setting in settings for part in ("--set", setting))],
            capture_output=True, text=True, check=False,
        )
        if ended.returncode:
            sys.exit(ended.stdout + ended.stderr)
        report: Report = json.loads(file.read_text())
    return report


def hit_tokens(report: Report) -> int:
    """Return the hits of all tiers."""
    return sum(report["tokens"]["hits"].values())


def hits_row(what: str, report: Report, reference_tokens: int, goal: float | None) -> Row:
    """Return a row of our hits beside the reference's; the hits of each tier are added to the label `what`."""
    ours, hits = hit_tokens(report), report["tokens"]["hits"]
    by_tier = " + ".join(f"{hits[tier]:,}" for tier in TIERS)
    ratio = ours / reference_tokens if reference_tokens else None
    return Row(f"{what} ({by_tier})", f"{ours:,}", f"{reference_tokens:,}", ratio, goal)


def policy_rows(trace: str | None) -> list[Row]:
    """Return rows of three small tiers under each write policy."""
    rows, most_bytes = [], 0
    for policy, (settings, goal) in POLICIES.items():
        report = replayed(trace, POLICY_REQUESTS, **settings)
        rows.append(
            hits_row(f"{policy}, of an ideal LRU", report, report["ideal"]["lru_tokens"], goal if trace else None)
        )
        stored_bytes = report["moved_bytes"]["host_to_storage"]
        most_bytes = most_bytes or stored_bytes
        limit = 1.0 if trace and "selective" in policy else None
        rows.append(Row(f"{policy}, bytes written", f"{stored_bytes / 1e9:.2f} GB", f"{most_bytes / 1e9:.2f} GB",
                        stored_bytes / most_bytes if most_bytes else None, limit))
    return rows


def size_rows(trace: str | None) -> list[Row]:
    """Return rows of a large L1 over each size of L2, with a fast store, a slow store, and without a store."""
    rows = []
    for name, host_tokens in HOSTS.items():
        tiers: dict[str, Any] = {"device__tokens": DEVICE_TOKENS, "host__tokens": host_tokens}
        fast = replayed(trace, SIZE_REQUESTS, **tiers, storage__type="memory")
        seen = fast["tokens"]["seen"]
        rows.append(hits_row(f"L2 {name}, of all seen before", fast, seen, SIZE_GOAL if trace else None))
        slowed = replayed(trace, SIZE_REQUESTS, SLOW, **tiers, storage__type="memory")
        rows.append(hits_row(f"L2 {name}, slow store, of all seen before", slowed, seen, None))
        alone = hit_tokens(replayed(trace, SIZE_REQUESTS, **tiers, storage="null"))
        rows.append(hits_row(f"L2 {name}, slow store, of no store", slowed, alone, 1.0 if trace else None))
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Hits of replays beside ideal caches")
    parser.add_argument("trace", nargs="?", help="the public conversation trace (default: a synthetic one, no goals)")
    parser.add_argument("--only", choices=("policies", "sizes"), help="one of the two tables")
    options = parser.parse_args()
    if options.only != "sizes":
        print_table("Hit tokens (L1 + L2 + storage) of three small tiers", policy_rows(options.trace))
    if options.only != "policies":
        print_table("Hit tokens (L1 + L2 + storage) of a large L1", size_rows(options.trace))


if __name__ == "__main__":
    main()
