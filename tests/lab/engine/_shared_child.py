"""One of several engines that share storage, in its own process.

    python -m tests.lab.engine._shared_child CONFIGURATION

Prints `ready`. Then it serves each line of standard input, a JSON list of prompts, waits until their pages are stored,
and prints one line with a JSON list of answers.
"""

from __future__ import annotations

import json
import sys

from hicache.config import load_config
from hicache.lab.engine import Engine, create_engine
from tests.lab.engine.sharing import NEW_TOKENS, Answer

DRAIN_S = 30.0


def serve(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """Serve `prompts` together, and wait until their pages are stored."""
    rids = [engine.submit(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    records = engine.run_until_done(DRAIN_S)
    if not engine.cache.drain(DRAIN_S):
        raise SystemExit(f"not all pages were stored within {DRAIN_S} s")
    return [Answer(list(records[rid].output_tokens), records[rid].storage_hit_tokens) for rid in rids]


def main() -> None:
    """Serve until standard input ends."""
    config = load_config(sys.argv[1])
    with create_engine(config) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            answers = serve(engine, json.loads(line))
            print(json.dumps([[answer.tokens, answer.storage_hit_tokens] for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
