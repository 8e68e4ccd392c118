"""All comparisons with the engines' own offloading, and those with other projects' stores that are installed:
`.venv-engines/bin/python -m lab.benchmarks.engines [--path DIR]`."""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> None:
    """Run each benchmark in a separate process, so that it does not inherit the memory of another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="directory to write in (default: temporary ones below the current directory)")
    path = parser.parse_args().path
    place = ["--path", path] if path else []
    for module in ("sglang_files", "sglang_tree", "vllm_tiers", "ttft"):
        subprocess.run([sys.executable, "-m", f"lab.benchmarks.engines.{module}", *place], check=True)
    for module, *options in (["file_backend", "--only", "small"], ["redis_backend", "--only", "tcp"], ["gil"]):
        command = [sys.executable, "-m", f"lab.benchmarks.{module}", *options]
        subprocess.run([*command, *(place if module != "redis_backend" else ())], check=True)


if __name__ == "__main__":
    main()
