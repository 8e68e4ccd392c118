"""Run all benchmarks that need neither an engine nor a trace, or one of them.

    python -m lab.benchmarks [--peer DIR] [--smallest]
    python -m lab.benchmarks NAME [OPTION ...] [--write docs/benchmarks/NAME.md] [--smallest]

NAME is a module of this package, such as tree or engines.ttft. `--write` also writes its tables as a page, with the
date and the machine. `--smallest` makes each table once with the smallest sizes, which only shows that it can be made.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ._table import PAGE_VARIABLE, SMALLEST_VARIABLE, page_head, this_machine

ALL = ("tree", "steps", "poll", "file_backend", "openings", "redis_backend", "s3_backend", "mooncake_backend", "levels",
       "daemon", "tags", "guard", "outage", "copies", "events", "allocators", "break_even", "ranks", "gil")
WITH_PEERS = ("tree", "file_backend", "redis_backend", "gil")


def main() -> None:
    """Run each benchmark in a separate process, so that it does not inherit the memory of another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a single benchmark; further options are its own")
    parser.add_argument("--peer", help="directory with the unpacked wheels of SGLang and LMCache")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables of NAME to this page")
    parser.add_argument("--smallest", action="store_true", help="once, with the smallest sizes, to see that it runs")
    options, rest = parser.parse_known_args()
    if options.name is None and (options.write is not None or rest):
        parser.error(f"{rest[0] if rest else '--write'} needs the NAME of a benchmark")
    environ = dict(os.environ) | ({SMALLEST_VARIABLE: "1"} if options.smallest else {})
    if options.write is not None:
        options.write.write_text(page_head(options.name, this_machine()), encoding="utf-8")
        environ[PAGE_VARIABLE] = str(options.write.resolve())
    for name in ALL if options.name is None else (options.name,):
        peer = ["--peer", options.peer] if options.peer and name in (*WITH_PEERS, options.name) else []
        subprocess.run([sys.executable, "-m", f"lab.benchmarks.{name}", *rest, *peer], env=environ, check=True)


if __name__ == "__main__":
    main()
