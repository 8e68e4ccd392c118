"""HiCache's tree publishes the events of SGLang's own trees. No engine starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from .process import EngineProcess
from .sglang_engine import sglang_environ
from .sglang_events import ADAPTER_ID

# Of requests, of an adapter that was loaded at start, and of one that only its request names.
EXTRA_KEYS = [None, "key", "named", f"key{ADAPTER_ID}"]
NAMESPACES = list(itertools.product(EXTRA_KEYS, [None, "salt"]))
# With a common prefix, so that nodes are split, and one that continues another.
TOKENS = [[*range(13)], [*range(4), *range(50, 62)], [*range(25)]]

PROMPTS: list[list[Any]] = [[tokens, *namespace] for namespace in NAMESPACES for tokens in TOKENS]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sglang-events")
    with EngineProcess("tests.engines.sglang_events", {}, folder=folder, environ=sglang_environ()) as started:
        yield started


def ordered(blocks: list[list[Any]]) -> list[str]:
    return sorted(map(str, blocks))


def image(token: int) -> int:
    """Return the id of a position: SGLang's ids of images have 62 bits."""
    return (1 << 61) + token if token in range(4, 7) else token


@pytest.mark.parametrize("dynamo", [False, True], ids=["default", "dynamo"])
@pytest.mark.parametrize("kind", ["tokens", "bigrams", "images"])
def test_blocks_of_each_namespace_are_those_of_sglangs_trees(process: EngineProcess, kind: str, dynamo: bool) -> None:
    bigram, wide = kind == "bigrams", kind == "images"
    prompts = [[list(map(image, tokens)) if wide else tokens, *names] for tokens, *names in PROMPTS]
    python, rust, host = process.call("theirs", prompts=prompts, bigram=bigram, dynamo=dynamo)
    served, left = process.call("ours", prompts=prompts, bigram=bigram, dynamo=dynamo, wide=wide)
    assert served.pop(0) == ["cleared"]
    found = served + left
    on = {medium: [each for each in found if each[0] == medium] for medium in ("GPU", "CPU_PINNED", "EXTERNAL")}
    assert len(python) == 2 * len(NAMESPACES) * 9  # each page is stored and removed
    assert ordered(on["GPU"]) == ordered(python) == ordered(rust)
    assert ordered(on["CPU_PINNED"]) == ordered(host)
    stored = [each[1:] for each in on["GPU"] if len(each) > 2]
    assert ordered([each[1:] for each in on["EXTERNAL"]]) == ordered(stored)


def held(blocks: list[list[Any]]) -> list[str]:
    """Return the blocks that a router has after these events."""
    there: dict[tuple[Any, ...], str] = {}
    for block in blocks:
        if block == ["cleared"]:
            there.clear()
        elif len(block) == 2:
            del there[tuple(block)]
        else:
            there[tuple(block[:2])] = str(block)
    return sorted(there.values())


def test_events_that_nobody_took_in_time_become_a_snapshot_of_the_tree(process: EngineProcess) -> None:
    prompts = [each for each in PROMPTS if each[1] != "key"]  # with "key" alone, SGLang publishes the hashes without it
    followed, _ = process.call("ours", prompts=prompts)
    late, left = process.call("ours", prompts=prompts, behind=True)
    assert late[:3] == [["cleared"]] * 3  # the start, the gap, and the start of the snapshot
    assert held(late) == held(followed) and len(late) == 3 + 3 * 6 * 9
    assert held(late + left) == []
