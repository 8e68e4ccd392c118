"""Tokens from hash ids: equal blocks are equal, and the next turn contains the last output."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hicache.keys import TOKEN_ID_MAX
from hicache_lab.traces.tokens import TokenSource, drawn
from lab.tests.replay.world import request


def test_equal_blocks_have_equal_tokens_and_different_ones_different_tokens() -> None:
    source = TokenSource()
    one, two = source.take(request(0, [1, 2])), source.take(request(1, [1, 3]))
    assert np.array_equal(one.prompt[:512], two.prompt[:512])
    assert not np.array_equal(one.prompt[512:], two.prompt[512:])


def test_prompt_and_output_have_the_lengths_of_the_trace() -> None:
    taken = TokenSource().take(request(0, [1, 2], tail=100, output=33))
    assert (len(taken.prompt), len(taken.output)) == (612, 33)
    assert len(TokenSource().take(request(0, [1], output=0)).output) == 0


def test_outputs_differ_from_each_other_and_from_all_blocks() -> None:
    source = TokenSource()
    taken = [source.take(request(i, [i], output=512)) for i in range(20)]
    streams = {bytes(part.tobytes()) for one in taken for part in (one.prompt, one.output)}
    assert len(streams) == 40


def test_tokens_are_valid_ids_of_a_key() -> None:
    tokens = drawn(1, np.arange(200, dtype=np.uint64), 512)
    assert tokens.dtype == np.uint32
    assert int(tokens.max()) <= TOKEN_ID_MAX
    assert len(np.unique(tokens)) > 0.99 * tokens.size


@pytest.mark.parametrize("output", [30, 412, 2000])
def test_the_next_turn_begins_with_the_last_prompt_and_its_output(output: int) -> None:
    source = TokenSource()
    first = source.take(request(0, [1, 2, 3], tail=100, output=output))
    history = np.concatenate((first.prompt, first.output))
    blocks = 2 + -(-(100 + output + 50) // 512)
    second = source.take(request(1, [1, 2, *range(10, 10 + blocks - 2)]))
    assert np.array_equal(second.prompt[: len(history)], history)
    assert second.seen_tokens == len(history)


def test_every_later_prompt_with_these_blocks_has_the_same_tokens() -> None:
    source = TokenSource()
    source.take(request(0, [1, 2, 3], tail=100, output=30))
    second = source.take(request(1, [1, 2, 10, 11]))
    third = source.take(request(2, [1, 2, 10, 12]))
    assert np.array_equal(second.prompt[:1536], third.prompt[:1536])
    assert third.seen_tokens == 1536


def test_a_prompt_too_short_for_the_last_output_does_not_continue_it() -> None:
    source = TokenSource()
    first = source.take(request(0, [1, 2, 3], tail=100, output=600))
    second = source.take(request(1, [1, 2, 10]))
    assert not np.array_equal(second.prompt[1024:1124], first.prompt[1024:])
    assert second.seen_tokens == 1024


def test_a_prompt_after_a_shared_block_does_not_continue_another_request() -> None:
    """The block of a system prompt is followed by many prompts; their outputs are their own."""
    source = TokenSource()
    source.take(request(0, [1, 2]))
    first = source.take(request(1, [1, 3], tail=10, output=10))
    second = source.take(request(2, [1, 4]))
    assert not np.array_equal(second.prompt[512:522], first.prompt[512:])
    assert second.seen_tokens == 512


def test_a_repeated_prompt_is_seen_as_a_whole() -> None:
    source = TokenSource()
    assert source.take(request(0, [1, 2], tail=7)).seen_tokens == 0
    assert source.take(request(1, [1, 2], tail=7)).seen_tokens == 519


def test_tokens_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Engines and replays of different processes share pages only if their tokens are equal. A change of this digest
    makes all stored pages of replays useless."""
    taken = TokenSource().take(request(0, [46], output=3))
    digest = hashlib.sha256(np.concatenate((taken.prompt, taken.output)).astype("<u4").tobytes()).hexdigest()
    assert digest == "a2feb3389ce4bca8bdcacff6ee4e176666d2297bbc7ae7517277017fc8f82405"
