"""HiCache as SGLang's tree beside SGLang's own hierarchical cache: hits, processor time of the scheduler, time to first
token.

    .venv-engines/bin/python -m lab.benchmarks.engines.sglang_tree [--path DIRECTORY] [--rounds N] [--page-size TOKENS]

Each side is an unmodified SGLang, one after another, with equal L1, L2 and page size: with files, each with its own
store, and without storage. The first of the sides alternates. All serve the same conversations: a prompt repeats the
questions and answers before it, four requests are in flight, L1 holds two fifths of all tokens and L2 four fifths. A
long answer beside them keeps the scheduler from idling, so each poll counts. Limits and thresholds are the defaults,
but both sides wait for all pages of a prefetch.

The processor time is that of the scheduler's thread in calls of the tree's public methods. Copies between device and
host are left out: on a CPU, SGLang's are Python stand-ins on this thread, where a GPU has kernels; ours run on threads.
Then single prompts are asked for their first token, from L2 (more prompts in turns than L1 holds) and from files (after
a flush of device and host). The model is small, so these times are mostly those of SGLang's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache.frame import frame_bytes
from lab.benchmarks._table import Row, print_table, reduced
from lab.benchmarks.engines._sglang_tree import save_plugin
from lab.benchmarks.engines._sides import wait_until_stored
from tests.engines.model import HEAD_DIM, KV_HEADS, LAYERS, save_model
from tests.engines.process import EngineProcess
from tests.engines.sglang_engine import flush, sglang_environ, sglang_options

_TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
_L1_TOKENS, _L2_TOKENS = 10240, 20480
_CONVERSATIONS, _TURNS = reduced(20, 4), reduced(10, 2)
_REQUESTS = _CONVERSATIONS * _TURNS
# More prompts than L1 holds, and fewer than L2.
_PROMPT_TOKENS, _PROMPTS = 1900, reduced(8, 6)
_ASKED = reduced(3)
_HIT_TOKENS = 1800
_TALK_TIMEOUT_S = 300.0
# A call has its own row from this time per request.
_CALL_S_MIN = 20e-6


@dataclass
class Side:
    """An engine's tree, and its rounds. `calls_s` is the processor time per request of each call. An answer is the
    seconds to a prompt's first token, and the cached tokens of the prompt."""

    is_ours: bool
    has_files: bool
    cached: list[int] = field(default_factory=list)
    calls_s: list[dict[str, float]] = field(default_factory=list)
    talks: list[list[list[int]]] = field(default_factory=list)
    from_l2: list[tuple[float, int]] = field(default_factory=list)
    from_files: list[tuple[float, int]] = field(default_factory=list)

    def measure(self, model: Path, folder: Path, page_tokens: int) -> None:
        """Add a round, in the empty folder `folder`. Raises EngineFailed."""
        store = folder / "store"
        store.mkdir(mode=0o700)
        prompts = range(_PROMPTS)
        with self._open(model, folder, page_tokens) as engine:
            engine.call("tree_calls")
            sizes = {"conversations": _CONVERSATIONS, "turns": _TURNS}
            cached, talks = engine.call("converse", timeout_s=_TALK_TIMEOUT_S, **sizes)
            calls = engine.call("tree_calls").items()
            self.calls_s.append({name: taken_ns / 1e9 / _REQUESTS for name, (_, taken_ns) in calls})
            self.cached.append(cached)
            self.talks.append(talks)
            for number in prompts:
                engine.call("ask", number=number, tokens=_PROMPT_TOKENS)
            wait_until_stored(store)
            for number in list(prompts) * _ASKED:
                self.from_l2.append(engine.call("ask", number=number, tokens=_PROMPT_TOKENS))
            for _ in range(_ASKED if self.has_files else 0):
                flush(engine)
                self.from_files += [engine.call("ask", number=number, tokens=_PROMPT_TOKENS) for number in prompts]

    def _open(self, model: Path, folder: Path, page_tokens: int) -> EngineProcess:
        save_plugin(folder / "plugin")
        environ = sglang_environ(SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(folder / "store"))
        environ["PYTHONPATH"] += f":{folder / 'plugin'}"
        options = sglang_options(
            model, page_size=page_tokens, max_total_tokens=_L1_TOKENS, context_length=4096, max_running_requests=6,
            hicache_ratio=_L2_TOKENS / _L1_TOKENS,
        )
        if self.has_files:
            options["hicache_storage_backend"] = "file"
        if self.is_ours:
            environ["HICACHE_CONFIG_FILE"] = self._configured(folder, page_tokens)
            options["radix_cache_backend"] = "hicache"
        return EngineProcess("lab.benchmarks.engines._sglang_tree", options, folder=folder, environ=environ)

    def _configured(self, folder: Path, page_tokens: int) -> str:
        pages = _L2_TOKENS // page_tokens
        config: dict[str, object] = {
            "host": {"size": f"{pages * frame_bytes(page_tokens * _TOKEN_BYTES)}B"},
            "prefetch": {"policy": "wait_complete"},
        }
        if self.has_files:
            config["storage"] = {"type": "file", "options": {"path": str(folder / "store"), "capacity": "8GiB"}}
        path = folder / "hicache.yaml"
        path.write_text(json.dumps(config))
        return str(path)


def rows_of(ours: Side, theirs: Side) -> list[Row]:
    """Return rows of medians; a ratio above 1 means that ours is better for cached tokens, and below 1 for times."""
    label, sides = "files" if ours.has_files else "no storage", (ours, theirs)
    cached = [statistics.median(side.cached) for side in sides]
    same = sum(mine == other for mine, other in zip(ours.talks[-1], theirs.talks[-1], strict=True))
    rows = [
        Row(
            f"{label}: cached tokens of {_REQUESTS} requests, {same} of {_CONVERSATIONS} talks equal",
            f"{cached[0]:,.0f}", f"{cached[1]:,.0f}", cached[0] / cached[1], 1.0,
        ),
        _row(
            f"{label}: processor time of the tree's calls per request",
            [[sum(calls.values()) for calls in side.calls_s] for side in sides], 1.0,
        ),
    ]
    for name in sorted({name for side in sides for calls in side.calls_s for name in calls}):
        taken = [[calls.get(name, 0.0) for calls in side.calls_s] for side in sides]
        if max(map(statistics.median, taken)) >= _CALL_S_MIN:
            rows.append(_row(f"{label}: of it, {name}", taken))
    for what, answers in (("L2", [side.from_l2 for side in sides]), ("files", [side.from_files for side in sides])):
        hits = [[seconds for seconds, found in each if found >= _HIT_TOKENS] for each in answers]
        if all(hits):
            counts = " and ".join(f"{len(hit)} of {len(each)}" for hit, each in zip(hits, answers, strict=True))
            rows.append(_row(f"{label}: time to first token from {what}, {counts} hits", hits, 1.0))
    return rows


def _row(what: str, seconds: Sequence[Sequence[float]], goal: float | None = None) -> Row:
    """Return a row of medians in milliseconds, with the best in brackets."""
    ours, theirs = (statistics.median(each) for each in seconds)
    mine, other = (f"{statistics.median(each) * 1e3:.3g} ms ({min(each) * 1e3:.3g})" for each in seconds)
    return Row(what, mine, other, ours / theirs if theirs else None, goal)


def run(path: str | None, rounds: int, page_tokens: int) -> list[Row]:
    """Measure in a temporary directory below `path` (default: the current directory)."""
    pairs = [(Side(True, files), Side(False, files)) for files in ((True, False) if reduced(2) > 1 else (True,))]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as name:
        model = save_model(Path(name, "model"))
        for number in range(reduced(rounds)):
            for at, side in enumerate(side for pair in pairs for side in pair[:: 1 if number % 2 else -1]):
                folder = Path(name, f"{number}-{at}")
                folder.mkdir()
                side.measure(model, folder, page_tokens)
    return [row for pair in pairs for row in rows_of(*pair)]


def main() -> None:
    parser = argparse.ArgumentParser(description="HiCache as SGLang's tree beside SGLang's own")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each engine; the table has medians")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page")
    options = parser.parse_args()
    rows = run(options.path, options.rounds, options.page_size)
    print_table(f"HiCache as SGLang's tree beside SGLang's own, pages of {options.page_size} tokens", rows)


if __name__ == "__main__":
    main()
