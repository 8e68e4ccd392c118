"""An engine of `soak_faults`, in its own process. It reads prompts and writes answers as lines of JSON.

    python -m tests.soak_engine '{"page_size": 16, ...}'

Between prompts it steps from time to time, as an idle engine does. Its log goes to standard error.
"""

from __future__ import annotations

import json
import select
import sys
import time

import torch

from hicache.config import HiCacheConfig
from hicache.logs import set_up_logging
from hicache_lab.engine import Engine, create_engine

# The interval between steps of an idle engine.
IDLE_S = 0.05


def answer(engine: Engine, prompt: list[int], new_tokens: int) -> dict[str, object]:
    """Serve one prompt. Return its tokens, its hits by tier, and its duration."""
    begin_s = time.monotonic()
    engine.submit(prompt, new_tokens, ignore_eos=True)
    while True:
        for update in engine.step():
            record = update.record
            if record is not None:
                hits = [record.device_hit_tokens, record.host_hit_tokens, record.storage_hit_tokens]
                return {"tokens": list(record.output_tokens), "hits": hits, "took_s": time.monotonic() - begin_s,
                        "error": None if record.error is None else str(record.error)}
        engine.rest()


def main() -> None:
    """Serve until standard input ends."""
    set_up_logging()
    torch.set_num_threads(1)
    with create_engine(HiCacheConfig.model_validate_json(sys.argv[1])) as engine:
        print("{}", flush=True)  # it has started
        while True:
            if not select.select([sys.stdin], [], [], IDLE_S)[0]:
                engine.step()
                continue
            line = sys.stdin.readline()
            if not line:
                return
            print(json.dumps(answer(engine, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
