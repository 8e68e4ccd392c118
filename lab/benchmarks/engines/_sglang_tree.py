"""One SGLang in a separate process, whose scheduler counts the processor time of its tree's calls. See `sglang_tree`.

`register` is a plug-in of SGLang: `save_plugin` writes the entry point by which each process of SGLang finds it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.model import VOCABULARY
from tests.engines.process import serve

_ANSWER_TOKENS = 16
# Requests in flight beside the long one.
_CLIENTS = 4
_QUESTION_TOKENS = (40, 120)
_SHARED_TOKENS = 128
_FIRST_TOKENS = 160


def save_plugin(folder: Path) -> None:
    """Make `folder`, in PYTHONPATH, a distribution with the plug-in."""
    info = folder / "hicache_benchmark-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-benchmark\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nhicache_benchmark = {__name__}:register\n")


class Meter:
    """The calls of a tree by name: how many, and nanoseconds of the thread's processor time.

    A call inside another one is part of that one. Copies between device and host are left out.
    """

    def __init__(self) -> None:
        self._calls: dict[str, list[int]] = {}
        self._inside, self._copied_ns = False, 0

    def watch(self, tree: Any) -> None:
        """Count the calls of all public methods of `tree`."""
        for name in dir(type(tree)):
            if not name.startswith("_") and callable(getattr(type(tree), name)):
                setattr(tree, name, self._counted(name, getattr(tree, name)))

    def leave_out(self, owner: type, name: str) -> None:
        """Subtract the time of this method of `owner` from the calls."""
        copy = getattr(owner, name)

        @functools.wraps(copy)
        def left_out(*positional: Any, **named: Any) -> Any:
            start_ns = time.thread_time_ns()
            try:
                return copy(*positional, **named)
            finally:
                self._copied_ns += time.thread_time_ns() - start_ns

        setattr(owner, name, left_out)

    def take(self) -> dict[str, list[int]]:
        """Return the calls since the last `take`."""
        calls, self._calls = self._calls, {}
        return calls

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*positional: Any, **named: Any) -> Any:
            if self._inside:
                return method(*positional, **named)
            self._inside, self._copied_ns = True, 0
            start_ns = time.thread_time_ns()
            try:
                return method(*positional, **named)
            finally:
                taken_ns = time.thread_time_ns() - start_ns - self._copied_ns
                self._inside = False
                counts = self._calls.setdefault(name, [0, 0])
                counts[0] += 1
                counts[1] += taken_ns

        return counted


def register() -> None:
    """Watch the tree of a scheduler. `Scheduler.write_tree_calls` writes the calls since the last one to a file."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    meter = Meter()

    def watched(create: Callable[..., Any], context: Any) -> Any:
        from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: PLC0415

        tree = create(context)
        for name in ("load_to_device_per_layer", "backup_from_device_all_layer"):
            meter.leave_out(MHATokenToKVPoolHost, name)
        Scheduler.write_tree_calls = lambda _, path: Path(path).write_text(json.dumps(meter.take()))
        meter.watch(tree)
        return tree

    HookRegistry.register("sglang.srt.mem_cache.registry.create_tree_cache", watched, HookType.AROUND)


class Conversation:
    """Turns of random questions. Each prompt has all questions and answers before it."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self.prompt = [*_tokens(random.Random(-1), _SHARED_TOKENS), *_tokens(self._random, _FIRST_TOKENS)]

    def ask(self) -> list[int]:
        self.prompt += _tokens(self._random, self._random.randint(*_QUESTION_TOKENS))
        return self.prompt


def _tokens(source: random.Random, count: int) -> list[int]:
    return source.choices(range(3, VOCABULARY), k=count)


def _sampling(tokens: int) -> dict[str, object]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from sglang import Engine  # noqa: PLC0415
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash  # noqa: PLC0415

    get_native_hash([0], None)  # compiled at its first use
    engine = Engine(**options)

    async def generate(prompt: Sequence[int], tokens: int, **named: object) -> tuple[list[int], int]:
        answer: Any = await engine.async_generate(input_ids=list(prompt), sampling_params=_sampling(tokens), **named)
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    async def talk(conversations: Sequence[Conversation], turns: int) -> list[int]:
        cached = []
        for conversation in list(conversations) * turns:
            answer, found = await generate(conversation.ask(), _ANSWER_TOKENS)
            conversation.prompt += answer
            cached.append(found)
        return cached

    async def talk_all(conversations: int, turns: int) -> tuple[int, list[list[int]]]:
        length = options["context_length"] - 64
        long = asyncio.create_task(generate(_tokens(random.Random(-2), 32), length, rid="long"))
        every = [Conversation(number) for number in range(conversations)]
        cached = await asyncio.gather(*(talk(every[client::_CLIENTS], turns) for client in range(_CLIENTS)))
        assert not long.done(), "the long answer ended before the others"
        engine.tokenizer_manager.abort_request(rid="long")
        await asyncio.wait([long])
        return sum(map(sum, cached)), [each.prompt for each in every]

    def converse(conversations: int, turns: int) -> tuple[int, list[list[int]]]:
        """Hold conversations, `_CLIENTS` at a time, beside one long answer, so that the scheduler never idles. Return
        the cached tokens of all requests, and the conversations."""
        found: tuple[int, list[list[int]]] = engine.loop.run_until_complete(talk_all(conversations, turns))
        return found

    def ask(number: int, tokens: int) -> tuple[float, int]:
        """Return the seconds to the first token of a prompt, and its cached tokens."""
        prompt = _tokens(random.Random(number), tokens)
        start_s = time.perf_counter()
        _, cached = engine.loop.run_until_complete(generate(prompt, 1))
        return time.perf_counter() - start_s, cached

    def flush() -> bool:
        """Empty device and host memory. Return False while a request is in flight."""
        return bool(engine.flush_cache().success)

    def tree_calls() -> dict[str, list[int]]:
        """Return the tree's calls since the last time."""
        path = Path(tempfile.gettempdir(), "tree-calls")
        engine.collective_rpc("write_tree_calls", path=str(path))
        calls: dict[str, list[int]] = json.loads(path.read_text())
        return calls

    return {"converse": converse, "ask": ask, "flush": flush, "tree_calls": tree_calls}


if __name__ == "__main__":
    serve(start)
