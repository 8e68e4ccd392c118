"""How well replays in virtual time and plans agree with what they stand for, and what they cost.

    python -m lab.benchmarks.planning [TRACE] [--requests N] [--only real|plan|cost]

*Real*: `hicache replay --virtual` beside `hicache replay` with the same arguments, in real time, over a store in memory
and one of files in `TMPDIR` (use a RAM disk), at three sizes each. The store of the virtual replay has the speed that
`hicache doctor` measures here.
*Plan*: `hicache plan` beside `hicache replay --virtual` with the recorded times of arrival, at three sizes of each
tier, for one node and for four with session routing.
Both columns are hit tokens from L1 + L2 + L3. The ratio is 1 minus the largest difference on one tier, as a share of
all hits of the reference.
*Cost*: processor time and memory, beside the limits: a virtual replay of the whole trace with the KV of Llama-3.1-8B,
and a plan for a million requests (a synthetic trace).

The trace is not part of this project; docs/traces.md says where to get it. Without TRACE a synthetic trace is used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hicache.cli.model_shapes import PRESETS
from hicache.units import GIB
from hicache_lab.tier_names import TIERS

from ._table import Row, print_table

AGREEMENT = 0.98
# Slow enough that this machine's copies and stores never decide whether a hit pays.
REAL_PREFILL_TOKENS_PER_S = 150_000
# Llama-3.1-8B on an H100: see docs/planning.md.
H100 = ("--prefill-rate", "30800", "--attention-rate", "9.4e8", "--host-bandwidth", "50GB/s")
FAST_STORE = "read=60GB/s,write=30GB/s,fixed=100us,parallel=16"
MILLION = 1_000_000
# Tokens on L1, L2 and L3.
REAL_SIZES = ((131_072, 524_288, 240_000), (262_144, 2_097_152, 240_000), (131_072, 4_194_304, 240_000))
PLAN_SIZES = (
    (200_000, 1_600_000, 16_000_000), (400_000, 1_600_000, 16_000_000), (1_600_000, 3_200_000, 16_000_000),
    (400_000, 400_000, 4_000_000), (400_000, 6_400_000, 40_000_000), (800_000, 1_600_000, 8_000_000),
)


class Ended(NamedTuple):
    """A finished command: its JSON report, processor time in seconds, and the most memory that it had."""

    report: dict[str, Any]
    cpu_s: float
    peak_bytes: int


def hicache(*arguments: str) -> Ended:
    """Run a command with `--json`. If it fails, the benchmark ends and prints its output."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        file, output = Path(folder, "report.json"), Path(folder, "output")
        with output.open("wb") as text:
            command = [sys.executable, "-m", "hicache", *arguments, "--json", str(file)]
            process = subprocess.Popen(command, stdout=text, stderr=text)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(output.read_text())
        return Ended(json.loads(file.read_text()), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def agreement_row(what: str, ours: Mapping[str, int], reference: Mapping[str, int]) -> Row:
    """Return a row from two counts of hit tokens by tier."""
    text, other = (" + ".join(f"{hits[tier]:,}" for tier in TIERS) for hits in (ours, reference))
    worst = max(abs(ours[tier] - reference[tier]) for tier in TIERS)
    return Row(what, text, other, 1 - worst / max(1, sum(reference.values())), AGREEMENT)


def _tokens(count: int) -> str:
    return f"{count / 1e6:.3g} M" if count >= MILLION else f"{count // 1000}k"


def real_rows(trace: list[str], requests: int) -> list[Row]:
    """Return rows of virtual replays beside real ones."""
    rows = []
    page_bytes = 64 * PRESETS["tiny"].token_bytes + 4096
    for device, host, pages in REAL_SIZES:
        for store in ("memory", "file"):
            with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
                config = Path(folder, "store.json")
                options: dict[str, Any] = {"capacity": pages * page_bytes}
                if store == "file":
                    options = {"capacity": f"{pages * page_bytes}B", "path": f"{folder}/pages", "free_space_floor": 0}
                storage = {"type": store, "options": options}
                config.write_text(json.dumps({"page_size": 64, "device": {"tokens": device}, "host": {"tokens": host},
                                              "storage": storage}))
                speeds = Path(folder, "speeds.json")
                if store == "file":
                    doctor = ["doctor", "-c", str(config), "--model", "tiny", "--json"]
                    speeds.write_text(subprocess.check_output([sys.executable, "-m", "hicache", *doctor], text=True))
                both = ["replay", *trace, "--requests", str(requests), "-c", str(config),
                        "--prefill-rate", str(REAL_PREFILL_TOKENS_PER_S)]
                like = ["--like", str(speeds)] if store == "file" else []
                ours = hicache(*both, "--virtual", *like).report["tokens"]["hits"]
                real = hicache(*both).report["tokens"]["hits"]
            rows.append(agreement_row(f"{store}, L1 {_tokens(device)}, L2 {_tokens(host)} tokens", ours, real))
    return rows


def plan_rows(trace: list[str], requests: int) -> list[Row]:
    """Return rows of plans beside virtual replays."""
    rows, token_bytes = [], PRESETS["llama-3.1-8b"].token_bytes
    for nodes in (1, 4):
        for sizes in PLAN_SIZES:
            device, host, storage = sizes
            planned = hicache(
                "plan", *trace, "--requests", str(requests), "--model", "llama-3.1-8b", *H100, "--storage", FAST_STORE,
                *(part for name, count in zip(("device", "host", "storage"), sizes, strict=True)
                  for part in (f"--{name}-size", f"{count * token_bytes}B")),
                "--nodes", str(nodes), "--routing", "session",
            ).report["tiers"]
            replayed = hicache(
                "replay", *trace, "--requests", str(requests), "--model", "llama-3.1-8b", *H100, "--virtual",
                "--storage", FAST_STORE, "--device-tokens", str(device), "--host-tokens", str(host),
                "--set", "storage.type=memory", "--set",
                f"storage.options.capacity={storage // 64 * (64 * token_bytes + 4096)}",
                "--processes", str(nodes), "--routing", "session", "--speed-up", "1",
            ).report["tokens"]["hits"]
            what = f"{nodes} x (L1 {_tokens(device)}, L2 {_tokens(host)}), L3 {_tokens(storage)} tokens"
            rows.append(agreement_row(what, {tier: planned[tier]["hit_tokens"] for tier in TIERS}, replayed))
    return rows


def cost_rows(trace: list[str]) -> list[Row]:
    """Return rows of processor time and memory beside their limits."""
    virtual = hicache(
        "replay", *trace, "--requests", "0" if trace else "2000", "--model", "llama-3.1-8b", *H100, "--virtual",
        "--storage", FAST_STORE, "--device-tokens", "400000", "--host-tokens", "4000000",
        "--set", "storage.options.capacity=2TiB",
    )
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        million = str(Path(folder, "million.jsonl"))
        subprocess.run([sys.executable, "-m", "hicache", "trace", "generate", million, "--requests", str(MILLION)],
                       check=True, stdout=subprocess.DEVNULL)
        planned = hicache("plan", million, "--model", "llama-3.1-8b", *H100)
    rows = []
    for what, ended, limit_s in (
        (f"virtual replay of {virtual.report['requests']['ended']:,} requests", virtual, 120),
        ("plan for 1,000,000 requests", planned, 300),
    ):
        rows.append(Row(f"{what}, processor time", f"{ended.cpu_s:.0f} s", f"{limit_s} s", ended.cpu_s / limit_s, 1.0))
        rows.append(Row(f"{what}, memory", f"{ended.peak_bytes / GIB:.2f} GiB", "2 GiB", ended.peak_bytes / 2 / GIB,
                        1.0))
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Agreement and cost of virtual replays and plans")
    parser.add_argument("trace", nargs="?", help="a trace (default: a synthetic one)")
    parser.add_argument("--requests", type=int, default=1000, help="requests of a real replay; twice as many of a plan")
    parser.add_argument("--only", choices=("real", "plan", "cost"), help="one of the three tables")
    options = parser.parse_args()
    trace = [options.trace] if options.trace else []
    if options.only in (None, "real"):
        print_table("Hit tokens of replays in virtual time, beside real time", real_rows(trace, options.requests))
    if options.only in (None, "plan"):
        print_table("Hit tokens of plans, beside replays in virtual time", plan_rows(trace, 2 * options.requests))
    if options.only in (None, "cost"):
        print_table("Processor time and memory, beside the limits", cost_rows(trace))


if __name__ == "__main__":
    main()
