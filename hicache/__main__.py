"""`python -m hicache`: the same as the `hicache` command, whose entry point is here."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command. Ctrl-C while it is still imported ends it as any later one, without a traceback."""
    try:
        from hicache.cli.main import main  # noqa: PLC0415 - takes a part of a second
    except KeyboardInterrupt:
        sys.exit(130)
    main(prog_name="hicache")


if __name__ == "__main__":
    run()
