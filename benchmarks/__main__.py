"""All benchmarks: `python -m benchmarks [--peer DIR]`."""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> None:
    """Run each benchmark in a separate process, so that it does not inherit the memory of another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="directory with SGLang's unpacked wheel, for the tree")
    peer = parser.parse_args().peer
    for module, arguments in (
        ("tree", ["--peer", peer] if peer else []),
        ("poll", []),
        ("file_backend", []),
        ("redis_backend", []),
        ("s3_backend", []),
        ("mooncake_backend", []),
        ("levels", []),
        ("daemon", []),
        ("tags", []),
        ("guard", []),
        ("outage", []),
        ("copies", []),
        ("events", []),
        ("allocators", []),
        ("break_even", []),
        ("ranks", []),
    ):
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], check=True)


if __name__ == "__main__":
    main()
