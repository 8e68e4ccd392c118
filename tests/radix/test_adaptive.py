"""Adaptive eviction from the tree."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from hicache.keys import TOKEN_BYTES, RadixKey, token_bytes
from hicache.radix import AdaptiveEviction, Node, RadixTree, check_tree, make_policy
from hicache.tournament import PASSED_MAX, Tournament
from tests.seeds import rng, seeds

PAGE, BLOCK_PAGES = 2, 3
BLOCK_BYTES = PAGE * BLOCK_PAGES * TOKEN_BYTES


def key(*tokens: int, seed: bytes = b"") -> RadixKey:
    return RadixKey(token_bytes(list(tokens)), seed)


def tree_of(pages: int, *, keeps_host: bool = True) -> RadixTree:
    adaptive = AdaptiveEviction(PAGE * TOKEN_BYTES, BLOCK_PAGES, pages, keeps_host=keeps_host)
    return RadixTree(PAGE, make_policy("adaptive"), run_pages_max=8, adaptive=adaptive)


def path_of(node: Node) -> tuple[bytes, bytes]:
    """Return the seed and the key bytes of the path to a node."""
    data = b""
    while node.parent is not None:
        data, node = node.key + data, node.parent
    return node.page_keys or b"", data


def block_of(node: Node) -> tuple[int, int, bool]:
    seed, data = path_of(node)
    block = xxh3_64_intdigest(seed)
    for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
        block = xxh3_64_intdigest(data[end - BLOCK_BYTES : end], block)
    rest = len(data) % BLOCK_BYTES
    return block, rest, len(node.key) >= rest and len(data) - rest > len(data) - len(node.key)


@pytest.mark.parametrize("seed", seeds(10))
def test_the_block_of_a_node_is_that_of_its_prompt_after_splits_and_growth(seed: int) -> None:
    numbers, tree, page, growths = rng(seed), tree_of(100), 1, 0
    assert tree.adaptive is not None
    for _ in range(150):
        tokens = [numbers.randrange(2) for _ in range(numbers.randint(1, 40))]
        chosen = key(*tokens, seed=numbers.choice([b"", bytes(31) + b"\x01"]))
        count = chosen.pages(PAGE)
        node = tree.insert(chosen, np.arange(page, page + count, dtype=np.int32)).node
        page += count
        if numbers.random() < 0.3 and node.parent is not None:  # a running request, whose last node may grow
            tree.lock(node)
            tree.adaptive._block_of(node)
            longer = key(*tokens[: count * PAGE], *[5] * 8, seed=chosen.seed)
            grown = tree.insert(longer, np.arange(page, page + 4, dtype=np.int32), below=node, start_page=count).node
            page += 4
            growths += grown is node
            tree.unlock(node)
            assert tree.adaptive._block_of(grown) == block_of(grown)
        for some in numbers.sample(list(tree.nodes()), min(3, tree.node_count)):
            assert tree.adaptive._block_of(some) == block_of(some)
        if numbers.random() < 0.2:
            tree.evict_device(numbers.randint(1, 20))
        check_tree(tree)
    assert growths


class Served:
    """Requests on a tree with room for `pages` pages of L1, and `host_pages` of L2 for copies of all."""

    def __init__(self, policy: str, pages: int, host_pages: int = 0) -> None:
        self.tree = tree_of(max(pages, host_pages)) if policy == "adaptive" else RadixTree(PAGE, make_policy(policy))
        self.pages, self.host_pages, self.next_page, self.hits = pages, host_pages, 1, 0

    def serve(self, *tokens: int) -> None:
        tree, chosen = self.tree, key(*tokens)
        if tree.adaptive is not None:
            tree.adaptive.begin(chosen)
        match = tree.match(chosen)
        self.hits += match.pages
        tree.lock(match.node)
        count = chosen.pages(PAGE)
        tree.evict_device(max(0, tree.device_pages_total + count - match.device_pages.size - self.pages))
        tree.unlock(match.node)
        pages = np.concatenate([match.device_pages, self.take(count - match.device_pages.size)])
        node = tree.insert(chosen, pages).node
        while self.host_pages and node.parent is not None:
            if node.host is None:
                tree.hold_host(node)
                tree.evict_host(max(0, tree.host_pages + tree.pages(node) - self.host_pages), copy_pages_max=10**6)
                tree.release_host(node)
                tree.set_host(node, self.take(tree.pages(node)))
            node = node.parent
        check_tree(tree)

    def take(self, count: int) -> np.ndarray:
        self.next_page += count
        return np.arange(self.next_page - count, self.next_page, dtype=np.int32)


def hits_of_a_scan(policy: str, pages: int, host_pages: int = 0) -> int:
    """Eight popular prompts of three blocks, whose uses are further apart than the tree is large."""
    served = Served(policy, pages, host_pages)
    for number in range(600):
        first = number // 2 % 8 if number % 2 else 1000 + number
        served.serve(first, *range(3 * BLOCK_PAGES * PAGE - 1))
    return served.hits


@pytest.mark.parametrize(("pages", "host_pages"), [(90, 0), (36, 90)])
def test_a_scan_does_not_evict_popular_prompts(pages: int, host_pages: int) -> None:
    """On L1 alone, and on L2 below a small L1."""
    assert hits_of_a_scan("adaptive", pages, host_pages) > 2 * hits_of_a_scan("lru", pages, host_pages) + 500


@pytest.mark.parametrize("pages", [150, 300])
def test_short_prompts_do_not_lose_their_place_to_long_ones(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of less than a block return, and long ones never. The tree passes over what the shadow of LRU holds."""
    monkeypatch.setattr(Tournament, "is_lru", False)
    hits = {}
    for policy in ("lru", "adaptive"):
        numbers, served = rng(0), Served(policy, pages)
        for number in range(1500):
            short = [numbers.randrange(30), *range((BLOCK_PAGES - 1) * PAGE - 1)]
            served.serve(*(short if number % 10 else [1000 + number, *range(20 * PAGE - 1)]))
        hits[policy] = served.hits
    assert hits["adaptive"] >= 0.95 * hits["lru"] > 500


def test_short_questions_after_a_common_prompt_leave_in_the_order_of_lru() -> None:
    served = Served("adaptive", 200)
    common = range(BLOCK_PAGES * PAGE)
    for question in range(5):
        served.serve(*common, 100 + question, 101)
    tree = served.tree
    served.serve(*common, 100, 101)  # the first one is reused
    reused, *others = sorted((node for node in tree.nodes() if not node.children), key=lambda node: node.created)
    keeps = tree.queues.device.keeps
    assert keeps is not None and tree.adaptive is not None
    assert not keeps(reused)  # while LRU is the best
    tree.adaptive._tournament._best = 1
    assert [keeps(node) for node in (reused, *others)] == [True, False, False, False, False]


def filled(pages: int) -> RadixTree:
    """Return a tree whose prompts of one block are all kept, without copies."""
    tree = tree_of(pages)
    assert tree.adaptive is not None
    tree.adaptive._tournament._best = 1
    for number in range(pages // BLOCK_PAGES):
        chosen = key(number, *range(BLOCK_PAGES * PAGE - 1))
        tree.adaptive.begin(chosen)
        tree.insert(chosen, np.arange(1 + number * BLOCK_PAGES, 1 + (number + 1) * BLOCK_PAGES, dtype=np.int32))
    return tree


@pytest.mark.parametrize("prompts", [5, 3 * PASSED_MAX])
def test_a_tree_that_keeps_everything_still_evicts(prompts: int) -> None:
    tree = filled(prompts * BLOCK_PAGES)
    evicted = tree.evict_device(prompts * BLOCK_PAGES)
    assert len(evicted.pages) == prompts * BLOCK_PAGES
    assert tree.node_count == 0


def test_an_eviction_passes_over_a_bounded_number_of_nodes() -> None:
    tree = filled(3 * PASSED_MAX * BLOCK_PAGES)
    asked: list[Node] = []
    keeps = tree.queues.device.keeps
    assert keeps is not None

    def counted(node: Node) -> bool:
        asked.append(node)
        return keeps(node)

    tree.queues.device.keeps = counted
    tree.evict_device(1)
    assert len(asked) == PASSED_MAX


def test_l1_passes_over_nodes_without_a_copy_only() -> None:
    tree = filled(4 * BLOCK_PAGES)
    first, second, *_ = sorted(tree.nodes(), key=lambda node: node.last_access)
    tree.set_host(second, np.arange(BLOCK_PAGES, dtype=np.int32))
    tree.evict_device(BLOCK_PAGES)
    assert (first.device is not None, second.device is None, second.host is not None) == (True, True, True)


def test_with_pages_chosen_by_their_second_use_l2_evicts_as_lru() -> None:
    assert tree_of(9).queues.host.keeps is not None
    assert tree_of(9, keeps_host=False).queues.host.keeps is None
    assert tree_of(9, keeps_host=False).queues.device.keeps is not None


def test_other_policies_ask_nobody() -> None:
    tree = RadixTree(PAGE, make_policy("lru"))
    assert [tree.adaptive, tree.queues.device.keeps, tree.queues.host.keeps] == [None, None, None]
