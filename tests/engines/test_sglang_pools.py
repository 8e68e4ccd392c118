"""SGLang's trees with a sliding window or states over HiCache's store, beside SGLang's own file store.

No engine starts. The trees, pools, controllers and storage threads are SGLang's, and the requests are those of its test
kit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from .process import EngineProcess
from .sglang_engine import sglang_environ

# Tokens per page and per window.
SIZES = {"full": (16, 0), "window": (16, 2), "state": (64, 1)}
# The number of a prompt, a pool, and a page of it.
Damaged = Sequence[tuple[int, str, int]]
Served = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sglang-pools")
    with EngineProcess("tests.engines.sglang_pools", {}, folder=folder, environ=sglang_environ()) as process:
        yield process


@pytest.fixture
def served(sglang: EngineProcess, tmp_path: Path) -> Served:
    """Return a function that serves prompts on SGLang's trees: for each the tokens of the hit, the pages in host memory
    and the wrong ones among them."""

    def serve(
        kind: str, is_theirs: bool, prompts: list[list[int]], asked: list[list[int]], damaged: Damaged = (),
        in_place: tuple[bool, bool] = (True, True),
    ) -> list[list[int]]:
        folder = tmp_path / f"{kind}-{is_theirs}"
        folder.mkdir()
        answer: list[list[int]] = sglang.call(
            "served", kind=kind, folder=str(folder), is_theirs=is_theirs, prompts=prompts, asked=asked, damaged=damaged,
            in_place=in_place,
        )
        return answer

    return serve


def prompt(kind: str, *parts: tuple[int, int]) -> list[int]:
    """Return the tokens of a prompt: for each part its first token, and its pages."""
    tokens, _ = SIZES[kind]
    return [first + number for first, pages in parts for number in range(pages * tokens)]


def work(kind: str, seed: int) -> dict[str, list[list[int]]]:
    """Return prompts that share prefixes, and prompts that end elsewhere."""
    rng = random.Random(seed)
    stem = (1, rng.randrange(2, 4))
    stored = [prompt(kind, stem, (10_000 * (branch + 1), rng.randrange(2, 5))) for branch in range(2)]
    asked = [*stored, stored[0] + prompt(kind, (50_000, 2)), prompt(kind, stem)]
    asked.append(stored[1][: len(stored[1]) - SIZES[kind][0]])
    return {"prompts": stored, "asked": asked}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", SIZES)
def test_hits_are_those_of_sglangs_own_store(served: Served, kind: str, seed: int) -> None:
    mine, theirs = (served(kind, is_theirs, **work(kind, seed)) for is_theirs in (False, True))
    assert mine == theirs
    tokens, _ = SIZES[kind]
    assert mine[0][0] == len(work(kind, seed)["prompts"][0])  # the control: pages are found
    assert all(pages >= hit // tokens and wrong == 0 for hit, pages, wrong in mine)


@pytest.mark.parametrize(("kind", "pool"), [("full", "kv"), ("window", "swa"), ("state", "mamba"), ("window", "kv")])
def test_a_damaged_page_is_not_served_as_by_sglangs_own_store(served: Served, kind: str, pool: str) -> None:
    asked = prompt(kind, (1, 6))
    damaged = (0, pool, 2 if pool == "kv" else 5)
    (mine,) = served(kind, False, prompts=[asked], asked=[asked], damaged=[damaged])
    (theirs,) = served(kind, True, prompts=[asked], asked=[asked], damaged=[damaged])
    assert theirs[0] == len(asked) and theirs[2] == 1
    assert mine[0] < len(asked) and mine[2] == 0


@pytest.mark.parametrize("in_place", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kind", ["full", "window"])
def test_an_engine_that_copies_pages_shares_them_with_one_that_does_not(
    served: Served, kind: str, in_place: tuple[bool, bool]
) -> None:
    asked, other = prompt(kind, (1, 6)), prompt(kind, (10_000, 6))
    whole, part = served(
        kind, False, prompts=[asked, other], asked=[asked, other], damaged=[(1, "kv", 2)], in_place=in_place
    )
    assert whole[0] == len(asked) and whole[2] == 0
    assert part[0] < len(other) and part[2] == 0


def test_after_a_damaged_state_the_next_request_hits_up_to_an_earlier_one(served: Served) -> None:
    """SGLang drops the fetched pages of a hybrid model whole; the damaged page is removed then."""
    first = prompt("state", (1, 2))
    longer = first + prompt("state", (10_000, 2))
    asked = [longer, longer]
    found = served("state", False, prompts=[first, longer], asked=asked, damaged=[(1, "mamba", 3)])
    assert [hit for hit, _, _ in found] == [0, len(first)]
    assert not any(wrong for _, _, wrong in found)


def test_a_pool_that_is_registered_later_has_pages_of_its_own(sglang: EngineProcess, tmp_path: Path) -> None:
    assert sglang.call("added_pool", folder=str(tmp_path)) == [[True, True], True, 0]


def test_a_model_whose_anchor_has_no_bytes_is_served_by_its_other_pools(sglang: EngineProcess, tmp_path: Path) -> None:
    (refused,) = sglang.call("without_kv", folder=str(tmp_path), extra={})
    assert '"fixed_weights": true' in refused
    found = sglang.call("without_kv", folder=str(tmp_path), extra={"fixed_weights": True})
    pools = {"kv": 4, "deepseek_v4_c4": 3, "swa": 4}
    assert found == [3, [3], pools, [True, True, True, False], [True] * 4]


def test_a_refused_pool_ends_the_use_of_storage(sglang: EngineProcess, tmp_path: Path) -> None:
    stored, found, error, after = sglang.call("refused_pool", folder=str(tmp_path))
    assert (stored, found, after) == ([True], 1, 0)
    assert "does not describe its pages" in error
