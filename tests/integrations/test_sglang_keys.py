"""The keys of SGLang's prompts under HiCache's tree."""

from __future__ import annotations

from array import array

import pytest

from hicache.integrations.sglang_tree.views import prompt_key
from hicache.keys import RadixKey

PAGE = 4
IMAGE = 1 << 61  # SGLang names an image by ids of 62 bits


def key(
    tokens: list[int], extra_key: str | None = None, salt: str | None = None, *, bigram: bool = False,
    wide: bool = False,
) -> RadixKey | None:
    return prompt_key(array("q", tokens), extra_key, salt, page_size=PAGE, bigram=bigram, wide_ids=wide)


def test_a_key_is_that_of_hicaches_own_engine() -> None:
    assert key([1, 2, 3, 4, 5]) == RadixKey.of([1, 2, 3, 4, 5])
    assert key([1, 2, 3, 4, 5], "a", "s") == RadixKey.of([1, 2, 3, 4, 5], extra_key="a", cache_salt="s")
    assert key([1, 2, 3, 4, 5], bigram=True) == RadixKey.of([1, 2, 3, 4, 5], bigram=True)
    assert key([1, 2, 3, 4, 5], salt="") == RadixKey.of([1, 2, 3, 4, 5])


@pytest.mark.parametrize("tokens", [[], [1, 2, 3], [1, 2, 3, IMAGE], [1, 2, 3, -1]])
def test_a_prompt_that_the_tree_cannot_hold_has_no_key(tokens: list[int]) -> None:
    assert key(tokens) is None


def test_wide_ids_differ_in_each_bit_and_count_as_one_position() -> None:
    pages = [key([7, 8, 9, IMAGE ^ (1 << bit)], wide=True) for bit in range(61)]
    assert len({page.tokens for page in pages if page is not None}) == 61
    long = key([IMAGE + number for number in range(3 * PAGE + 1)], wide=True)
    assert long is not None and long.pages(PAGE) == 3 and len(long) == 3 * PAGE + 1


def test_adapters_and_tenants_with_wide_ids_share_nothing() -> None:
    tokens = [7, 8, 9, IMAGE]
    found = {key(tokens, *names, wide=True) for names in ((None, None), ("a", None), (None, "a"), ("a", "a"))}
    assert len(found) == 4
