"""All comparisons with the engines' own offloading:
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
    for module in ("sglang_files", "sglang_tree", "vllm_tiers", "ttft"):
        arguments = ["--path", path] if path else []
        subprocess.run([sys.executable, "-m", f"lab.benchmarks.engines.{module}", *arguments], check=True)


if __name__ == "__main__":
    main()
