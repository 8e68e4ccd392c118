"""What the garbage collector does not visit is freed all the same: removed nodes at once, the rest with their tree."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hicache.keys import PageChain, RadixKey, chain, page_keys
from hicache.policies import POLICIES
from hicache.radix import NodeHint, RadixTree, check_tree, eviction, prefixes, stored
from tests.seeds import rng, seeds

PAGE = 2


@pytest.fixture(params=["native", "python"])
def untrack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    helper = request.getfixturevalue("native").untrack if request.param == "native" else id
    for module in (chain, eviction, prefixes, stored):
        monkeypatch.setattr(module, "untrack", helper)
    return helper


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def grown(seed: int, steps: int = 120) -> tuple[RadixTree, list[NodeHint]]:
    """Return a tree after random prompts, splits, hints, copies, stores and evictions."""
    random, tree, hints = rng(seed), RadixTree(PAGE, POLICIES["lru"], run_pages_max=4), list[NodeHint]()
    for step in range(steps):
        key = RadixKey.of([random.randrange(3) for _ in range(PAGE * random.randint(1, 9))])
        pages = np.arange(100 * step + 1, 100 * step + 1 + key.pages(PAGE), dtype=np.int32)
        node = tree.insert(key, pages).node
        if random.random() < 0.3 and node.host is None:
            tree.accept_backup(node, pages[: tree.pages(node)])
            tree.page_keys(node)
            tree.stored.mark(node)
        if random.random() < 0.3:
            hints.append(NodeHint(tree.tick, 0.0, weakref.ref(tree), value=random.choice([-1.0, 0.5])))
            tree.hinted(lambda: 0.0).give(hints[-1], [node])
        if random.random() < 0.2:
            tree.evict_device(random.randint(1, 6))
        if random.random() < 0.1:
            tree.evict_host(random.randint(1, 6))
    check_tree(tree)
    return tree, hints


def contents(tree: RadixTree) -> list[weakref.ref[Any]]:
    """Return references to the page ids of all nodes; a node itself has none, for its size."""
    return [weakref.ref(ids) for node in tree.nodes() for ids in (node.device, node.host) if ids is not None]


@pytest.mark.usefixtures("_no_collections", "untrack")
@pytest.mark.parametrize("seed", seeds(5))
def test_removed_nodes_are_freed_without_a_collection(seed: int) -> None:
    tree, hints = grown(seed)
    held = contents(tree)
    assert held
    tree.evict_device(tree.device_pages_total)
    tree.evict_host(tree.host_pages)
    tree.evict_device(tree.device_pages_total)
    assert tree.node_count == 0
    for hint in hints:
        tree.hinted(lambda: 0.0).end(hint)
    # Stale entries keep their nodes until as many new ones push them out.
    for number in range(1000):
        key = RadixKey.of([9, number, *range(PAGE)])
        tree.insert(key, np.arange(2 * number, 2 * number + 2, dtype=np.int32))
        tree.evict_device(2)
    assert [ids() for ids in held if ids() is not None] == []


@pytest.mark.usefixtures("untrack")
@pytest.mark.parametrize("seed", seeds(5))
def test_a_dropped_tree_is_freed_with_its_nodes_and_hints(seed: int) -> None:
    tree, hints = grown(seed)
    held, dropped = contents(tree), weakref.ref(tree)
    assert held
    del tree, hints
    gc.collect()
    assert dropped() is None and [ids() for ids in held if ids() is not None] == []


@pytest.mark.parametrize("seed", seeds(5))
def test_the_collector_visits_nothing_whose_size_depends_on_the_number_of_nodes(untrack: Any, seed: int) -> None:
    tree, _ = grown(seed)
    for _ in range(3):
        gc.collect()
    queues = tree.queues
    keys = PageChain(bytes(40), 2, b"")
    held: list[object] = [tree._roots, tree.stored._ends, queues.copies._stack, keys, keys.keys()]
    for queue in (queues.device, queues.host):
        held += [queue._heap, *queue._heap]
    for node in (*tree.roots(), *tree.nodes()):
        held += [node, node.children] if node.children else [node]
    assert any(map(gc.is_tracked, held)) == (untrack is id)  # `id` is the negative control


@pytest.mark.usefixtures("untrack")
def test_a_tree_survives_a_finalizer_that_needs_it() -> None:
    class Owner:
        def __init__(self) -> None:
            self.me, self.tree = self, grown(1)[0]

        def __del__(self) -> None:
            saved.append(self.tree)

    saved: list[RadixTree] = []
    Owner()
    gc.collect()
    assert saved[0].node_count > 0
    check_tree(saved[0])


def test_the_parts_of_a_split_run_have_its_hint_until_it_ends() -> None:
    tree = RadixTree(PAGE, POLICIES["lru"])
    key = RadixKey.of(list(range(4 * PAGE)))
    node = tree.insert(key, np.arange(1, 5, dtype=np.int32)).node
    hint, order = NodeHint(tree.tick, 0.0, weakref.ref(tree), value=0.5), tree.hinted(lambda: 0.0)
    order.give(hint, [node])
    head = tree.match(key.head(PAGE)).node
    hints = [(head.hint, node.hint)]
    assert head is not node and tree.leave_device(node).tolist() == [2, 3, 4]
    hints.append((head.hint, node.hint))
    order.end(hint)
    assert [*hints, (head.hint, node.hint)] == [(hint, hint), (hint, None), (None, None)] and not hint.nodes
    check_tree(tree)


@pytest.mark.parametrize(("page_size", "longest"), [(1, 4096), (2, 2048), (4, 1024), (64, 1024)])
def test_a_run_of_small_pages_has_as_many_tokens_as_one_of_larger_pages(page_size: int, longest: int) -> None:
    tree = RadixTree(page_size, POLICIES["lru"])
    key = RadixKey.of(list(range(page_size * 9000)))
    node = tree.insert(key, np.arange(1, 9001, dtype=np.int32)).node
    assert max(map(tree.pages, tree.nodes())) == longest
    match = tree.match(key)
    assert match.device_pages.tolist() == list(range(1, 9001)) and match.device_count == match.pages == 9000
    assert b"".join(tree.page_keys(node)) == b"".join(page_keys(key.tokens, page_size))[-32 * tree.pages(node) :]
    check_tree(tree)
