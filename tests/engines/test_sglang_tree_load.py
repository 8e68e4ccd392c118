"""SGLang with HiCache as its tree, under load: requests at once that share prefixes, in chunks, with too few slots and
too little host memory, with priorities, over a store that is slow and fails, with requests that are aborted.

SGLang compares its slots after each step, and ends if one is lost or used twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.faults import spoiled
from tests.seeds import rng, seeds

from .prompts import prompt
from .sglang_engine import PAGE_TOKENS
from .sglang_tree import L1_TOKENS, Answers, TreeProcess, files, tokens

OUTPUT_TOKENS = 64
ABORTED_MIN = 200
PROMPTS = [prompt(f"load {number}", length) for number, length in itertools.product(range(8), (200, 300, 460))]
MODES: dict[str, dict[str, Any]] = {
    "overlap scheduling": {"disable_overlap_schedule": False},
    "two processes": {"tp_size": 2, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}},
}
_COMMON: dict[str, Any] = {
    "max_running_requests": 8, "chunked_prefill_size": 128, "enable_priority_scheduling": True,
    "schedule_conservativeness": 0.05,  # admits requests whose output will not fit
}
_FAULTS: dict[str, Any] = {"latency": "20ms", "error_share": 0.05}

Request = dict[str, Any]
Serve = Callable[[list[Request]], Answers]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeProcess]:
    with TreeProcess(tmp_path_factory.mktemp("sglang-tree-load")) as process:
        yield process


@pytest.fixture(scope="module")
def expected(process: TreeProcess, llama: Path) -> dict[tuple[int, ...], object]:
    """Return the tokens of each prompt."""
    process.begin_without_cache(llama)
    answers = process.ask_together([{"prompt": each} for each in PROMPTS], OUTPUT_TOKENS)
    return dict(zip(map(tuple, PROMPTS), tokens(answers), strict=True))


@pytest.fixture(scope="module", params=MODES)
def engine(
    request: pytest.FixtureRequest, process: TreeProcess, expected: object, llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> TreeProcess:
    (storage,) = files(tmp_path_factory.mktemp("load-pages")).values()
    config = {"host": {"size": "2MiB"}, "storage": spoiled(storage, **_FAULTS)}
    process.begin(llama, config, **_COMMON, **MODES[request.param])
    return process


@pytest.fixture
def serve(engine: TreeProcess, expected: dict[tuple[int, ...], object]) -> Serve:
    """Serve requests at once, and compare the tokens of those that were not aborted."""

    def answers(requests: list[Request]) -> Answers:
        found = engine.ask_together(requests, OUTPUT_TOKENS)
        for request, answer in zip(requests, found, strict=True):
            if answer["end"] != "abort":
                assert answer["tokens"] == expected[tuple(request["prompt"])], request
        return found

    return answers


def draw(dice: random.Random) -> Request:
    return {"prompt": dice.choice(PROMPTS), "priority": dice.choice((0, 50))}


@pytest.mark.parametrize("seed", seeds(1))
def test_tokens_are_equal_with_chunks_retraction_and_priorities(serve: Serve, seed: int) -> None:
    dice, retractions = rng(seed), 0
    found: set[str] = set()
    while not retractions or found < {"device", "host", "storage"}:
        for answer in serve([draw(dice) for _ in range(16)]):
            retractions += answer["retractions"]
            found |= answer["tiers"].keys()


@pytest.mark.parametrize("seed", seeds(1))
def test_aborted_requests_lose_no_slot(engine: TreeProcess, serve: Serve, seed: int) -> None:
    dice, aborted, numbers = rng(seed), 0, itertools.count()
    while aborted < ABORTED_MIN:
        requests = [draw(dice) | {"rid": f"request-{next(numbers)}"} for _ in range(50)]
        for request in requests[::4] + requests[1::4] + requests[2::4]:
            request["abort_after_s"] = dice.random()
        aborted += sum(answer["end"] == "abort" for answer in serve(requests))
    engine.flush()
    # The longest prompt that SGLang admits: it takes all slots, with one page for the output and one to spare.
    (whole,) = engine.ask_together([{"prompt": prompt("all slots", L1_TOKENS - 2 * PAGE_TOKENS)}], tokens=1)
    assert whole["end"] == "length"
