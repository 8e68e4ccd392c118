"""Two engine processes on one storage: each finds the pages of the other, also pages that both store at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hicache.config import HiCacheConfig, load_config
from hicache.lab.cli.demo import demo_storage
from hicache.lab.engine import create_engine
from tests.lab.engine._shared_child import serve
from tests.lab.engine.sharing import PAGE_TOKENS, PROMPT_TOKENS, Answer, configuration, engines, make_prompts

pytestmark = [pytest.mark.servers, pytest.mark.long]

WHOLE_PAGES = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS

COMMON, FIRST, SECOND = make_prompts(1, 2), make_prompts(2, 3), make_prompts(3, 3)


@pytest.fixture(scope="module")
def computed() -> dict[tuple[int, ...], list[int]]:
    """Return the tokens of each prompt in an engine without storage."""
    prompts = [*COMMON, *FIRST, *SECOND]
    with create_engine(HiCacheConfig.model_validate(configuration())) as engine:
        return {tuple(prompt): serve(engine, [prompt])[0].tokens for prompt in prompts}


@pytest.fixture
def config_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Write a configuration with the named, empty storage."""
    path = tmp_path / "engine.yaml"
    section = {"type": "file", "options": {"path": str(tmp_path / "pages"), "capacity": "256MiB"}}
    path.write_text(yaml.safe_dump({**configuration(), "storage": section}))
    with demo_storage(request.param, path) as made:
        yield made


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("config_file", ["valkey", "mooncake"], indirect=True)
def test_two_engines_that_store_at_once_find_the_pages_of_both(
    repository: Path, config_file: Path, computed: dict[tuple[int, ...], list[int]]
) -> None:
    first, second = [*COMMON, *FIRST], [*COMMON, *SECOND]
    with engines(repository, config_file, 2) as (one, two):
        one.ask(first)
        two.ask(second)
        assert tokens(one.answers()) == [computed[tuple(prompt)] for prompt in first]
        assert tokens(two.answers()) == [computed[tuple(prompt)] for prompt in second]
        one.ask(SECOND)
        two.ask(FIRST)
        for engine, prompts in ((one, SECOND), (two, FIRST)):
            answers = engine.answers()
            assert tokens(answers) == [computed[tuple(prompt)] for prompt in prompts]
            assert [answer.storage_hit_tokens for answer in answers] == [WHOLE_PAGES] * len(prompts)
    config = load_config(config_file)
    with create_engine(config) as third:
        answers = serve(third, COMMON)
        assert tokens(answers) == [computed[tuple(prompt)] for prompt in COMMON]
        assert [answer.storage_hit_tokens for answer in answers] == [WHOLE_PAGES] * len(COMMON)


def test_engines_without_a_common_storage_find_nothing(tmp_path: Path, repository: Path) -> None:
    """Negative control: the hits of the test above come only from storage."""
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump({**configuration(), "storage": {"type": "memory"}}))
    with engines(repository, path, 2) as (one, two):
        one.ask(FIRST)
        assert len(one.answers()) == len(FIRST)
        two.ask(FIRST)
        assert [answer.storage_hit_tokens for answer in two.answers()] == [0] * len(FIRST)
