"""Chains of page keys, which the first user hashes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.keys import PageChain, page_keys, token_bytes


class DropsParentFirst(PageChain):
    """A chain with a planted fault: it drops its parent chain before it has its own keys."""

    __slots__ = ()

    def keys(self) -> list[bytes]:
        prior = self._prior
        above, self._prior = (prior if isinstance(prior, bytes) else prior.keys()[-1]), b""
        if self.hashed is None:
            self.hashed = page_keys(self._tokens, self._page_size, above)
        return self.hashed


def one_page_chains(kind: type[PageChain], count: int) -> list[PageChain]:
    """Return chains of one page each, for a prompt of `count` pages of one token."""
    tokens = token_bytes(range(count))
    chains = [kind(tokens[:4], 1, b"")]
    for begin in range(4, 4 * count, 4):
        chains.append(kind(tokens[begin : begin + 4], 1, chains[-1]))
    return chains


def wrong_rounds(kind: type[PageChain]) -> int:
    """Return in how many of 50 rounds one of four threads that hash a prompt at once finds a wrong key."""
    whole = page_keys(token_bytes(range(256)), 1)
    asked = [255, 150, 254, 17, 255, 200]
    wrong = 0
    for _ in range(50):
        chains = one_page_chains(kind, 256)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number, of=chains: of[number].keys(), asked))
        wrong += found != [[whole[number]] for number in asked]
    return wrong


def test_chains_of_runs_have_the_keys_of_the_whole_prompt() -> None:
    tokens, seed = token_bytes(range(600)), bytes(range(32))
    whole = page_keys(tokens, 2, seed)
    chains: list[PageChain] = []
    for begin, end in itertools.pairwise([0, 1, 3, 100, 300]):
        chains.append(PageChain(tokens[8 * begin : 8 * end], 2, chains[-1] if chains else seed))
    assert [chain.pages for chain in chains] == [1, 2, 97, 200]
    assert chains[2].keys() == whole[3:100]
    assert chains[0].hashed == whole[:1] and chains[3].hashed is None
    assert [chain.prior_key() for chain in chains] == [seed, whole[0], whole[2], whole[99]]
    assert chains[3].keys() == whole[100:]


def test_a_chain_with_more_runs_than_the_recursion_limit_is_hashed() -> None:
    assert one_page_chains(PageChain, 4000)[-1].keys() == page_keys(token_bytes(range(4000)), 1)[-1:]


@pytest.mark.usefixtures("threads_switch_often")
def test_threads_that_hash_one_chain_at_once_find_the_same_keys() -> None:
    assert wrong_rounds(PageChain) == 0


@pytest.mark.usefixtures("threads_switch_often")
def test_a_chain_that_drops_its_parent_too_early_is_detected() -> None:
    assert wrong_rounds(DropsParentFirst) > 0
