"""Events of an engine's blocks: each is announced once per medium, with its tokens, and removed with its last page."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

import pytest

from hicache.errors import InvariantError
from hicache.events import BlockLabels, Cleared, Event, Medium, Origin, PageBlocks, PrefixIndex, Removed, Stored
from hicache.events.blocks import BlockLedger, BlocksRemoved, BlocksStored
from hicache.events.wire import WireForm, decode_batch, encode_batch
from hicache.keys import RadixKey, token_bytes
from tests.seeds import rng, seeds

from .router import Block, BlockRouter, blocks_in
from .test_wire import as_maps

BLOCK, PER_PAGE = 2, 3
PAGE = BLOCK * PER_PAGE
LABELS = BlockLabels(7, "lora", "full_attention")


def pages_of(tokens: Sequence[int], labels: BlockLabels = LABELS) -> list[PageBlocks]:
    """Return the blocks of each page of a prompt, with hashes of this test."""
    hashes = list[bytes]()
    for begin in range(0, len(tokens), BLOCK):
        before = hashes[-1] if hashes else b""
        hashes.append(hashlib.sha256(before + token_bytes(tokens[begin : begin + BLOCK])).digest())
    return [
        PageBlocks(
            b"".join(hashes[first : first + PER_PAGE]), hashes[first - 1] if first else None,
            token_bytes(tokens[first * BLOCK : first * BLOCK + PAGE]), (None,) * PER_PAGE, labels,
        )
        for first in range(0, len(hashes), PER_PAGE)
    ]


def keys_of(tokens: Sequence[int], adapter: str | None = None) -> tuple[bytes, ...]:
    hashes = [page.hashes[-32:] for page in pages_of(tokens)]
    key = RadixKey.of_hashes(hashes, extra_key=adapter)
    return tuple(key.page_keys(PAGE, b"", 0, len(hashes)))


def stored(
    tokens: Sequence[int], medium: Medium = Medium.HOST, begin: int = 0, *, adapter: str | None = None
) -> Stored:
    """Return the event of all pages of a prompt, or of those from `begin` on."""
    keys = keys_of(tokens, adapter)
    event = Stored(medium, keys, None, b"", b"", PAGE, blocks=tuple(pages_of(tokens)))
    return event.part(begin, len(keys))


def translated(events: Iterable[Event]) -> list[object]:
    return list(BlockLedger().translate(events))


TOKENS = list(range(2 * PAGE))
SIBLING = [*TOKENS[:8], 50, 51, 52, 53]  # has the first block of the second page
FIRST, SECOND = (list(blocks_in(page)) for page in pages_of(TOKENS))


def test_a_run_of_pages_is_a_run_of_blocks_with_tokens_parent_and_labels() -> None:
    whole, rest = translated([stored(TOKENS), stored(TOKENS, Medium.STORAGE, 1)])
    assert whole == BlocksStored(
        Medium.HOST, (*FIRST, *SECOND), None, token_bytes(TOKENS), BLOCK, (None,) * 6, LABELS, keys_of(TOKENS), None,
        PAGE,
    )
    assert isinstance(rest, BlocksStored)
    assert (rest.hashes, rest.parent, rest.page_parent) == (tuple(SECOND), FIRST[-1], keys_of(TOKENS)[0])


def test_siblings_share_their_first_blocks_until_the_last_one_is_removed() -> None:
    mine, theirs = keys_of(TOKENS), keys_of(SIBLING)
    _, other, gone, last = translated([
        stored(TOKENS), stored(SIBLING, begin=1), Removed(Medium.HOST, mine[1:]), Removed(Medium.HOST, theirs[1:]),
    ])
    assert isinstance(other, BlocksStored)
    assert (other.parent, len(other.hashes), other.tokens) == (SECOND[0], 2, token_bytes(SIBLING[8:]))
    assert gone == BlocksRemoved(Medium.HOST, tuple(SECOND[1:]), mine[1:])
    assert last == BlocksRemoved(Medium.HOST, (SECOND[0], *other.hashes), theirs[1:])


def test_pages_of_two_versions_of_an_adapter_announce_their_equal_blocks_once() -> None:
    """Their page keys differ, and the hashes of the engine do not."""
    versions = [keys_of(TOKENS, name)[:1] for name in ("one 1", "one 2")]
    stores = [stored(TOKENS, adapter=name).part(0, 1) for name in ("one 1", "one 2")]
    first, second, *gone = translated([*stores, *(Removed(Medium.HOST, keys) for keys in versions)])
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert (first.hashes, first.keys, second.hashes, second.keys) == (tuple(FIRST), versions[0], (), versions[1])
    assert gone == [BlocksRemoved(Medium.HOST, (), versions[0]), BlocksRemoved(Medium.HOST, tuple(FIRST), versions[1])]


def test_a_page_whose_blocks_are_unknown_is_a_block_without_tokens() -> None:
    key = keys_of(TOKENS)
    event = stored(TOKENS)._replace(blocks=(None, pages_of(TOKENS)[1]))
    unknown, known, gone = translated([event, Removed(Medium.HOST, key)])
    assert isinstance(unknown, BlocksStored) and isinstance(known, BlocksStored)
    assert (unknown.hashes, unknown.tokens, unknown.block_tokens) == (key[:1], b"", PAGE)
    assert (known.hashes, known.parent) == (tuple(SECOND), FIRST[-1])
    assert gone == BlocksRemoved(Medium.HOST, (key[0], *SECOND), key)


def test_a_page_that_was_not_announced_is_not_removed() -> None:
    assert translated([stored(TOKENS), Removed(Medium.STORAGE, keys_of(TOKENS))]) == translated([stored(TOKENS)])


def test_withdrawing_removes_all_blocks_and_only_them() -> None:
    ledger, router = BlockLedger(), BlockRouter()
    router.apply(ledger.translate([stored(TOKENS), stored(SIBLING, begin=1), stored(TOKENS, Medium.STORAGE)]))
    assert [len(router.on[medium]) for medium in Medium] == [0, 8, 6]
    router.apply(ledger.withdraw())
    assert not any(router.on.values()) and not list(ledger.withdraw())


@pytest.mark.parametrize("seed", seeds(20))
def test_the_announced_blocks_are_those_of_the_pages_on_each_medium(seed: int) -> None:
    """And a follower of the same events knows the pages."""
    draw, router, index = rng(seed), BlockRouter(), PrefixIndex()
    pages: dict[Medium, dict[bytes, PageBlocks]] = {medium: {} for medium in Medium}
    for _ in range(300):
        event = random_event(draw, pages)
        events = list(router.ledger.translate([event]))
        router.apply(events)
        router.ledger.check()
        index.apply(decode_batch(encode_batch(events, 1.0)))
        for medium, found in pages.items():
            assert index.keys(medium) == found.keys()
            expected: dict[bytes, Block] = {}
            for page in found.values():
                expected |= blocks_in(page)
            assert router.on[medium] == expected


def random_event(draw: random.Random, pages: dict[Medium, dict[bytes, PageBlocks]]) -> Event:
    """Return a random event that the tree could make, and apply it to `pages`."""
    medium, action = draw.choice(list(Medium)), draw.random()
    if action < 0.01:
        for found in pages.values():
            found.clear()
        return Cleared()
    if action < 0.4 and pages[medium]:
        gone = draw.sample(sorted(pages[medium]), draw.randint(1, len(pages[medium])))
        for key in gone:
            del pages[medium][key]
        return Removed(medium, tuple(gone))
    tokens = [draw.randrange(2) for _ in range(PAGE * draw.randint(1, 3))]
    keys, described = keys_of(tokens), pages_of(tokens)
    begin = next((number for number, key in enumerate(keys) if key not in pages[medium]), len(keys) - 1)
    end = next((number for number in range(begin, len(keys)) if keys[number] in pages[medium]), len(keys))
    if begin == end:
        return Removed(medium, (bytes(32),))
    pages[medium] |= dict(zip(keys[begin:end], described[begin:end], strict=True))
    return stored(tokens, medium).part(begin, end)


def test_the_check_detects_a_lost_block() -> None:
    ledger = BlockLedger()
    list(ledger.translate([stored(TOKENS), stored(SIBLING, begin=1)]))
    ledger.check()
    ledger._families[Medium.HOST].popitem()
    with pytest.raises(InvariantError, match="announced blocks on host"):
        ledger.check()


def test_the_wire_has_the_fields_of_vllm_and_the_pages_of_hicache() -> None:
    events: list[Event] = [stored(TOKENS), Removed(Medium.HOST, keys_of(TOKENS))]
    first, gone = as_maps(BlockLedger().translate(events), WireForm())
    numbers = [int.from_bytes(block[-8:], "big") for block in (*FIRST, *SECOND)]
    assert first == {
        "type": "BlockStored", "block_hashes": numbers, "parent_block_hash": None, "token_ids": TOKENS,
        "block_size": BLOCK, "lora_id": 7, "medium": "CPU", "lora_name": "lora", "extra_keys": [None] * 6,
        "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }
    assert gone == {"type": "BlockRemoved", "block_hashes": numbers, "medium": "CPU", "group_idx": 0}
    found = decode_batch(encode_batch(BlockLedger().translate(events), 1.0))
    assert found[0] == Stored(Medium.HOST, keys_of(TOKENS), None, b"", b"", PAGE, Origin(7, "lora"))
    assert found[1] == events[1]


def test_without_token_ids_the_wire_has_no_tokens_of_blocks() -> None:
    (event,) = as_maps(BlockLedger().translate([stored(TOKENS)]), WireForm(token_ids=False))
    assert event["token_ids"] == []


def test_the_reprs_hide_tokens_and_hashes() -> None:
    (event,) = translated([stored(TOKENS)])
    assert (repr(pages_of(TOKENS)[0]), repr(event)) == ("PageBlocks(3 blocks)", "BlocksStored(host, 6 blocks of 2)")
