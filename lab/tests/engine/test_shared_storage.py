"""Two engine processes on one storage: each finds the pages of the other, also pages that both store at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hicache.config import HiCacheConfig, load_config
from hicache_lab.cli.demo import demo_storage
from hicache_lab.engine import create_engine
from lab.tests.engine.sharing import PAGE_TOKENS, PROMPT_TOKENS, answer, configuration, engines, make_prompts

pytestmark = [pytest.mark.servers, pytest.mark.long]

WHOLE_PAGES = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS

COMMON, FIRST, SECOND = make_prompts(1, 2), make_prompts(2, 3), make_prompts(3, 3)


@pytest.fixture(scope="module")
def computed() -> dict[tuple[int, ...], list[int]]:
    """Return the tokens of each prompt in an engine without storage."""
    prompts = [*COMMON, *FIRST, *SECOND]
    with create_engine(HiCacheConfig.model_validate(configuration())) as engine:
        return {tuple(prompt): answer(engine, [prompt])[0][0] for prompt in prompts}


@pytest.fixture
def config_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Write a configuration with the named, empty storage."""
    path = tmp_path / "engine.yaml"
    section = {"type": "file", "options": {"path": str(tmp_path / "pages"), "capacity": "256MiB"}}
    path.write_text(yaml.safe_dump({**configuration(), "storage": section}))
    with demo_storage(request.param, path) as made:
        yield made


@pytest.mark.parametrize("config_file", ["valkey", "mooncake"], indirect=True)
def test_two_engines_that_store_at_once_find_the_pages_of_both(
    config_file: Path, computed: dict[tuple[int, ...], list[int]]
) -> None:
    def hits(prompts: list[list[int]]) -> list[object]:
        return [[computed[tuple(prompt)], WHOLE_PAGES] for prompt in prompts]

    first, second = [*COMMON, *FIRST], [*COMMON, *SECOND]
    with engines(config_file, 2) as (one, two):
        one.submit("answer", prompts=first)
        two.submit("answer", prompts=second)
        for engine, prompts in ((one, first), (two, second)):
            assert [tokens for tokens, _ in engine.result("answer")] == [computed[tuple(prompt)] for prompt in prompts]
        one.submit("answer", prompts=SECOND)
        two.submit("answer", prompts=FIRST)
        assert (one.result("answer"), two.result("answer")) == (hits(SECOND), hits(FIRST))
    with create_engine(load_config(config_file)) as third:
        assert list(map(list, answer(third, COMMON))) == hits(COMMON)


def test_engines_without_a_common_storage_find_nothing(tmp_path: Path) -> None:
    """Negative control: the hits of the test above come only from storage."""
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump({**configuration(), "storage": {"type": "memory"}}))
    with engines(path, 2) as (one, two):
        assert len(one.call("answer", prompts=FIRST)) == len(FIRST)
        assert [hits for _, hits in two.call("answer", prompts=FIRST)] == [0] * len(FIRST)
