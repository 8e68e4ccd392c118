"""Engines in separate processes that share one storage: their prompts and configuration, and the steps of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hicache.config import load_config
from hicache_lab.engine import Engine, create_engine
from tests.engines.process import EngineProcess, serve
from tests.seeds import rng

NEW_TOKENS = 8
PAGE_TOKENS = 16
PROMPT_TOKENS = 20 * PAGE_TOKENS + 5
DRAIN_S = 30.0
# The vocabulary of the bundled model.
_VOCABULARY = 2048

# The tokens of each prompt, and how many of its tokens came from storage.
Answers = list[tuple[list[int], int]]


def configuration() -> dict[str, Any]:
    """Return the configuration of an engine with little memory, which always waits for storage and uses its pages."""
    return {
        "page_size": PAGE_TOKENS,
        "device": {"tokens": 4096},
        "host": {"tokens": 8192, "pin": "auto"},
        "load_back_threshold_tokens": PAGE_TOKENS,
        "prefetch": {"policy": "wait_complete", "threshold_tokens": 2 * PAGE_TOKENS},
        "break_even": {"mode": "always"},
    }


def make_prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts without common prefixes."""
    numbers = rng(seed)
    return [[numbers.randrange(3, _VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def answer(engine: Engine, prompts: list[list[int]]) -> Answers:
    """Serve `prompts` together, and wait until their pages are stored."""
    rids = [engine.submit(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    records = engine.run_until_done(DRAIN_S)
    assert engine.cache.drain(DRAIN_S), "not all pages were stored in time"
    return [(list(records[rid].output_tokens), records[rid].storage_hit_tokens) for rid in rids]


@contextmanager
def engines(config_file: Path, count: int) -> Iterator[list[EngineProcess]]:
    """Start `count` engines. Check that each closes without an error."""
    options = {"config": str(config_file)}
    with ExitStack() as stack:
        started = [
            stack.enter_context(EngineProcess("lab.tests.engine.sharing", options, folder=config_file.parent))
            for _ in range(count)
        ]
        yield started
        assert all(engine.call("close") for engine in started)


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    """Start an engine in its own process."""
    engine = create_engine(load_config(options["config"]))
    return {"answer": lambda prompts: answer(engine, prompts), "close": engine.close}


if __name__ == "__main__":
    serve(start)
