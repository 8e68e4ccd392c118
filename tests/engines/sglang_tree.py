"""SGLang with HiCache as its tree: one process in which one engine runs after the other, and what its answers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompts, write_config
from .sglang_engine import PAGE_TOKENS, sglang_options, tree_environ, tree_options

# The tokens of a prompt of 300 that can be cached; the last token is computed.
CACHED = 299 // PAGE_TOKENS * PAGE_TOKENS
# L1 in tokens: three prompts of 300 with their output, or four.
L1_TOKENS = 1536

Answers = list[dict[str, Any]]


class TreeProcess(EngineProcess):
    """A process that has imported SGLang. `begin` starts an engine in place of the one before, which is killed."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        environ = tree_environ(folder / "tree.yaml", **environ or {})
        super().__init__("tests.engines.sglang_engine", {}, folder=folder, environ=environ)

    def begin(
        self, model: Path, config: Mapping[str, object], *, environ: Mapping[str, str] | None = None, **changes: object
    ) -> None:
        """Start an engine with HiCache as its tree."""
        write_config(self._folder / "tree.yaml", **{"page_size": PAGE_TOKENS, **config})
        self._begin(tree_options(model, **{"max_total_tokens": L1_TOKENS, **changes}), environ)

    def begin_without_cache(self, model: Path, **changes: object) -> None:
        """Start an unmodified engine that computes each prompt."""
        no_cache = {"enable_hierarchical_cache": False, "disable_radix_cache": True}
        self._begin({**sglang_options(model), **no_cache, **changes})

    def _begin(self, options: dict[str, object], environ: Mapping[str, str] | None = None) -> None:
        # Otherwise the scheduler of an idle engine uses a core.
        self.call("begin", options={"sleep_on_idle": True, **options}, environ=environ or {})

    def ask(self, asked: list[list[int]], **fields: object) -> Answers:
        """Serve prompts one after the other. `fields` are those of SGLang's request."""
        return [answer for prompt in asked for answer in self.ask_together([{"prompt": prompt, **fields}])]

    def ask_together(self, requests: Sequence[Mapping[str, object]], tokens: int = 8) -> Answers:
        """Serve requests at once. See the step."""
        answers: Answers = self.call("together", requests=requests, tokens=tokens)
        return answers

    def flush(self) -> None:
        """Empty L1 and L2."""
        wait_for(lambda: bool(self.call("flush")), pause_s=0.05)


def push_out(engine: TreeProcess) -> None:
    """Fill L1 with other prompts."""
    engine.ask(prompts("others", 2048 // 300))


def files(folder: Path) -> dict[str, Any]:
    """Return the entry `storage` of a configuration with files."""
    return {"storage": {"type": "file", "options": {"path": str(folder), "free_space_floor": 0}}}


def tokens(answers: Answers) -> list[Any]:
    """Return the output of each request."""
    return [answer["tokens"] for answer in answers]


def tiers(answers: Answers) -> list[dict[str, int]]:
    """Return the cached tokens of each request by SGLang's names of tiers: device, host, storage."""
    return [answer["tiers"] for answer in answers]
